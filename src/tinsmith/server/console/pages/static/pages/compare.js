import { get, path } from "../api.js";
import { Chart, lineSample } from "../chart.js";
import { $, empty, fill, h, link, on, runLink } from "../dom.js";
import { runName } from "../format.js";
import { listen, soon } from "../live.js";
import { emptySeries, filtered, formatsOf, titleOf } from "../metrics.js";
import { page, trouble } from "../shell.js";

const MOST = 6;
const POINTS = 500;
const query = new URLSearchParams(location.search);
let ids = (query.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST);
let known = [];
let shown = []; // {run, metrics}
const charts = new Map();

page(async () => {
  known = (await get("/api/v1/training_runs", { limit: 200 })).training_runs;
  on("smoothing", "input", () => charts.forEach((chart) => chart.set({ smoothing: Number($("smoothing").value) })));
  on("axis", "change", showCurves);
  on("filter", "input", showCurves);
  on("all", "change", showCurves);
  on("add", "change", () => choose([...ids, $("add").value]));
  await load();
  listen({ step: heard, reset: soon(load, 300) });
}, "charts");

const metricsOf = (id) => get(path("training_runs", id, "metrics"), { points: POINTS });

async function load() {
  shown = await Promise.all(ids.map(async (id) => {
    const [run, metrics] = await Promise.all([get(path("training_runs", id)), metricsOf(id)]);
    return { run, metrics };
  }));
  showChoice();
  showCurves();
  showDifferences();
}

const stale = new Set();
const refresh = soon(async () => {
  const behind = shown.filter(({ run }) => stale.delete(run.training_run_id));
  await Promise.all(behind.map(async (each) => (each.metrics = await metricsOf(each.run.training_run_id))));
  showCurves();
}, 300);

function heard({ run }) {
  if (!ids.includes(run)) return;
  stale.add(run);
  refresh();
}

async function choose(next) {
  ids = [...new Set(next)].slice(0, MOST);
  history.replaceState(null, "", `/compare?runs=${ids.map(encodeURIComponent).join(",")}`);
  await load().catch((error) => trouble($("charts"), error));
}

function showChoice() {
  fill($("chosen"), shown.map(({ run }, index) => h("li", { class: "tag" }, lineSample(index), runLink(run.training_run_id, runName(run)), " ",
    h("button", { class: "small", "aria-label": `Remove ${runName(run)}`, onclick: () => choose(ids.filter((id) => id !== run.training_run_id)) }, "×"))));
  const others = known.filter((run) => !ids.includes(run.training_run_id));
  fill($("add"), h("option", { value: "", selected: true, disabled: true }, "Add a run …"), others.map((run) => h("option", { value: run.training_run_id }, runName(run))));
  $("add").hidden = ids.length >= MOST || !others.length;
}

function showCurves() {
  if (!shown.length) return fill($("charts"), empty("Nothing to compare yet", "Add two runs or more above, or choose them on the ", link("/", "runs"), " page."));
  const keys = [...new Set(shown.flatMap(({ metrics }) => metrics.keys))];
  const wanted = filtered(keys, (key) => shown.some(({ metrics }) => metrics.series[key]?.axis === "step"));
  if (!wanted.length) return fill($("charts"), empty("No metric to show", keys.length ? "Clear the filter to see all." : "These runs have no steps yet."));
  fill($("charts"), wanted.map((key) => chartOf(key).element));
  for (const [index, key] of wanted.entries()) {
    const lines = shown.map(({ run, metrics }) => aligned({ label: runName(run), ...(metrics.series[key] ?? emptySeries()) }));
    const isElapsed = $("axis").value === "elapsed";
    chartOf(key).widen(index === 0);
    chartOf(key).set({ lines, isElapsed, axis: isElapsed ? "t" : "x" });
  }
}

/** With seconds since the run's own beginning in place of the time of day. */
function aligned(line) {
  const start = line.t[0] ?? 0;
  return $("axis").value === "x" ? line : { ...line, t: line.t.map((t) => t - start) };
}

function chartOf(key) {
  if (!charts.has(key)) {
    const chart = new Chart(titleOf(key), { sync: "compare", ...formatsOf(key) });
    chart.smoothing = Number($("smoothing").value);
    charts.set(key, chart);
  }
  return charts.get(key);
}

function showDifferences() {
  const configs = shown.map(({ run }) => ({
    "Base model": run.base_model, "LoRA rank": String(run.lora_rank), "LoRA seed": String(run.lora_seed ?? "–"), ...run.user_metadata,
  }));
  const names = [...new Set(configs.flatMap(Object.keys))];
  const differ = (name) => new Set(configs.map((config) => config[name] ?? "–")).size > 1;
  const wanted = $("only").checked ? names.filter(differ) : names;
  $("only").onchange = showDifferences;
  if (!shown.length) return fill($("differences"));
  fill($("differences"), wanted.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Configuration of each run" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"), shown.map(({ run }) => h("th", { scope: "col" }, runName(run))))),
    h("tbody", {}, wanted.map((name) => h("tr", { class: differ(name) ? `differs${$("only").checked ? "" : " marked"}` : null }, h("th", { scope: "row" }, name), configs.map((config) => h("td", {}, config[name] ?? "–")))))))
    : h("p", { class: "muted" }, "These runs have the same configuration."));
}
