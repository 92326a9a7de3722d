import { get } from "../api.js";
import { $, bar, empty, fill, on, runLink, strip, table } from "../dom.js";
import { bytes, count } from "../format.js";
import { reload } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";

const EVERY_MS = 5000; // samples are no operations: nothing tells of them
const NAMES = { run: "Run", model: "Base model", day: "Day" };

page(async () => {
  const by = new URLSearchParams(location.search).get("by");
  if (NAMES[by]) $("by").value = by;
  on("by", "change", load);
  await load();
  setInterval(() => load().catch(() => {}), EVERY_MS);
  reload(load, ["operation", "sample", "checkpoint"]);
}, "usage");

async function load() {
  const by = $("by").value;
  history.replaceState(null, "", `/usage?by=${by}`);
  const [{ usage }, storage, nameOf] = await Promise.all([get("/api/v1/console/usage", { by }), get("/api/v1/billing/usage/checkpoints/current"), runNames()]);
  if (by !== "day") usage.sort((a, b) => totalOf(b) - totalOf(a));
  const sum = (name) => usage.reduce((total, item) => total + item[name], 0);
  const stored = storage.data[0];
  const cells = [
    ["Trained", count(sum("training_tokens")), "tokens"], ["Prompts", count(sum("prefill_tokens")), "tokens"],
    ["Prompts from the cache", count(sum("cached_prefill_tokens")), "tokens"], ["Sampled", count(sum("sampled_tokens")), "tokens"],
    ["Checkpoints", bytes(stored?.size_bytes ?? 0), `in ${stored?.checkpoint_count ?? 0}`],
  ];
  fill($("numbers"), strip(cells));
  if (!usage.length) return fill($("usage"), empty("Nothing used yet", "Tokens are counted as they are trained, read and sampled."));
  const most = Math.max(...usage.map(totalOf), 1);
  fill($("usage"), table(`Usage by ${NAMES[by].toLowerCase()}`, [
    [NAMES[by], (item) => (by === "run" && item.by ? runLink(item.by, nameOf(item.by)) : item.by || "base models, without a run"), "name"],
    ["Trained", (item) => count(item.training_tokens), "number"], ["Prompts", (item) => count(item.prefill_tokens), "number"],
    ["From the cache", (item) => count(item.cached_prefill_tokens), "number spare"], ["Sampled", (item) => count(item.sampled_tokens), "number"],
    ...(by === "run" ? [["Stored", (item) => bytes(item.stored_bytes), "number"]] : []),
    ["Share", (item) => bar([["run", 0, (1000 * totalOf(item)) / most]]), "when"],
  ], usage));
}

const totalOf = (item) => item.training_tokens + item.prefill_tokens + item.cached_prefill_tokens + item.sampled_tokens;
