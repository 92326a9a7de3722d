import { get, path } from "../api.js";
import { sparkline } from "../chart.js";
import { $, code, empty, fill, h, on, runCell, second, since, table, typed } from "../dom.js";
import { number, runName } from "../format.js";
import { listen, soon } from "../live.js";
import { statusPill } from "../run_status.js";
import { page } from "../shell.js";

const PAGE = 50;
const MOST_COMPARED = 6;
const runs = new Map();
const losses = new Map();
const chosen = new Set();
let total = 0;

page(async () => {
  on("search", "input", show);
  on("more", "click", () => load(runs.size));
  await load(0);
  setInterval(() => runs.forEach((_, id) => showLoss(id)), 5000);
  listen({ step: heard, run: refresh, checkpoint: refresh, reset: refresh });
}, "runs");

async function load(offset) {
  const found = await get("/api/v1/training_runs", { limit: PAGE, offset });
  total = found.cursor.total_count;
  for (const run of found.training_runs) runs.set(run.training_run_id, run);
  show();
  await Promise.all(found.training_runs.map((run) => loadLoss(run.training_run_id)));
}

async function loadLoss(id) {
  const found = await get(path("training_runs", id, "metrics"), { keys: "loss", points: 60 });
  losses.set(id, found.series.loss?.mean ?? []);
  showLoss(id);
}

const refresh = soon(() => load(0), 300);

function heard(step) {
  const run = runs.get(step.run);
  if (!run) return refresh();
  run.last_request_time = Date.now() / 1000;
  if (step.metrics?.loss === undefined) return;
  losses.set(step.run, [...(losses.get(step.run) ?? []), step.metrics.loss].slice(-200));
  showLoss(step.run);
}

function show() {
  const wanted = typed("search");
  const found = [...runs.values()].filter((run) => textOf(run).includes(wanted));
  $("count").textContent = total ? `${found.length === total ? "" : `${found.length} of `}${total}` : "";
  $("more").hidden = runs.size >= total;
  if (!total) return fill($("runs"), noRuns());
  if (!found.length) return fill($("runs"), empty("No run fits", "Runs are searched by id, base model and metadata", runs.size < total ? "; older ones are not shown yet." : "."));
  fill($("runs"), table("Runs", [
    [h("span", { class: "visually-hidden" }, "Choose"), pick, "pick"],
    ["Run", runCell, "name"],
    ["Status", part("status")], ["Loss per token", part("loss")], ["Now", part("now"), "number"],
    ["Base model", (run) => [run.base_model, second(`LoRA rank ${run.lora_rank}`)], "spare"],
    ["Metadata", (run) => tags(run), "spare"],
    ["Last request", part("last"), "nowrap"],
  ], found));
}

/** The parts of a row that change by themselves. */
const PARTS = { status: (id) => statusPill(runs.get(id)), loss: lossOf, now: (id) => newest(id), last: (id) => since(runs.get(id).last_request_time) };
const part = (name) => ({ training_run_id: id }) => h("span", { data: { [name]: id } }, PARTS[name](id));

function showLoss(id) {
  for (const name of Object.keys(PARTS)) document.querySelector(`[data-${name}="${CSS.escape(id)}"]`)?.replaceChildren(PARTS[name](id));
}

function lossOf(id) {
  const values = losses.get(id) ?? [];
  const label = values.length ? `loss from ${number(values[0])} to ${newest(id)}` : "no loss yet";
  return sparkline(values, label);
}

const newest = (id) => number(losses.get(id)?.at(-1));

const tags = (run) => h("div", { class: "tags" },
  Object.entries(run.user_metadata ?? {}).filter(([key]) => !/^(run_)?name$/.test(key)).slice(0, 6).map(([key, value]) => h("span", { class: "tag" }, `${key}: ${String(value).slice(0, 80)}`)));

const textOf = (run) => [run.training_run_id, run.base_model, ...Object.entries(run.user_metadata ?? {}).flat()].join(" ").toLowerCase();

function pick(run) {
  const id = run.training_run_id;
  return h("input", { type: "checkbox", checked: chosen.has(id), "aria-label": `Choose ${runName(run)}`, onchange: (event) => {
    if (event.target.checked) chosen.add(id);
    else chosen.delete(id);
    const ids = [...chosen].slice(-MOST_COMPARED);
    $("compare").hidden = ids.length < 2;
    $("compare").href = `/compare?runs=${ids.map(encodeURIComponent).join(",")}`;
    $("compare").textContent = `Compare ${ids.length}`;
  } });
}

const noRuns = () => h("div", { class: "empty" }, h("p", { class: "title" }, "No runs yet"),
  h("p", {}, "A run appears here as soon as a client creates a model:"),
  h("pre", { tabindex: "0" }, `import tinsmith\n\nservice = tinsmith.ServiceClient(base_url="${location.origin}")\nbase_model = service.get_server_capabilities().supported_models[0].model_name\ntraining = service.create_lora_training_client(base_model, rank=8)`),
  h("p", {}, "The key is read from ", code("TINKER_API_KEY"), ". To see one learn without writing a line, run ", code("tinsmith demo --keep"), "."));
