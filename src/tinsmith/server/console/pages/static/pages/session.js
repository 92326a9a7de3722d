import { get, path } from "../api.js";
import { $, code, empty, fill, runCell, since, table, terms } from "../dom.js";

import { listen, soon } from "../live.js";
import { statusPill } from "../run_status.js";
import { page } from "../shell.js";

const id = decodeURIComponent(location.pathname.split("/")[2]);

page(async () => {
  await load();
  const again = soon(load, 300);
  listen({ run: again, checkpoint: again, operation: ({ run }) => run.startsWith(`${id}:`) && again(), reset: again });
}, "runs");

async function load() {
  const session = await get(path("sessions", id));
  document.title = `${session.display_name || "Session"} · Tinsmith`;
  $("title").textContent = session.display_name || "Session";
  fill($("subtitle"), code(id));
  const facts = Object.entries(session.user_metadata ?? {});
  fill($("facts"), terms(facts));
  $("facts").hidden = !facts.length;
  const [runs, samplers] = await Promise.all([
    Promise.all(session.training_run_ids.map((run) => get(path("training_runs", run)))),
    Promise.all(session.sampler_ids.slice(0, 100).map((sampler) => get(path("samplers", sampler)).catch(() => ({ sampler_id: sampler }))))]);
  fill($("runs"), runs.length ? table("Runs of this session", [
    ["Run", runCell, "name"],
    ["Status", (run) => statusPill(run)],
    ["Base model", (run) => run.base_model],
    ["Last request", (run) => since(run.last_request_time), "nowrap"],
  ], runs) : empty("No runs", "create_lora_training_client() makes one."));
  fill($("samplers"), samplers.length ? table("Samplers of this session", [
    ["Sampler", (s) => code(s.sampler_id), "name"], ["Base model", (s) => s.base_model ?? "no longer there"],
    ["Checkpoint", (s) => (s.model_path ? code(s.model_path) : "none: the base model")],
  ], samplers) : empty("No samplers", "create_sampling_client() makes one."));
}
