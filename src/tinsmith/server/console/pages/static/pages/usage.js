import { get } from "../api.js";
import { $, empty, fill, runLink, strip, table } from "../dom.js";
import { bytes, count } from "../format.js";
import { listen, soon } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";

const EVERY_MS = 5000; // samples are no operations: nothing tells of them
const NAMES = { run: "Run", model: "Base model", day: "Day" };

page(async () => {
  const by = new URLSearchParams(location.search).get("by");
  if (NAMES[by]) $("by").value = by;
  $("by").addEventListener("change", load);
  await load();
  setInterval(() => load().catch(() => {}), EVERY_MS);
  const again = soon(load, 500);
  listen({ operation: again, checkpoint: again });
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
    ["From the cache", (item) => count(item.cached_prefill_tokens), "number"], ["Sampled", (item) => count(item.sampled_tokens), "number"],
    ...(by === "run" ? [["Stored", (item) => bytes(item.stored_bytes), "number"]] : []),
    ["Share", (item) => share(totalOf(item) / most), "when"],
  ], usage));
}

const totalOf = (item) => item.training_tokens + item.prefill_tokens + item.cached_prefill_tokens + item.sampled_tokens;

function share(part) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
  for (const [kind, width] of [["back", 100], ["run", 100 * part]]) {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of Object.entries({ class: kind, width, height: 8 })) rect.setAttribute(name, value);
    svg.append(rect);
  }
  return svg;
}
