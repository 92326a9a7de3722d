import { get, path } from "../api.js";
import { Chart } from "../chart.js";
import { $, checkpointLink, code, copyButton, empty, fill, h, link, on, pill, since, stepLink, strip, table, terms } from "../dom.js";
import { bytes, clock, count, duration, moment, number, runName, until } from "../format.js";
import { listen, soon } from "../live.js";
import { emptySeries, filtered, formatsOf, put, timesOf, titleOf } from "../metrics.js";
import { statusOf } from "../run_status.js";
import { page } from "../shell.js";

const POINTS = 500;
const MOST_FAILURES = 20;
const id = decodeURIComponent(location.pathname.split("/")[2]);
const here = (...parts) => path("training_runs", id, ...parts);
const charts = new Map();
const state = { run: null, keys: [], series: {}, checkpoints: [], queue: null };

page(async () => {
  state.run = await get(here());
  showHead();
  showConfig();
  controls();
  await loadCurves();
  await Promise.all([loadCheckpoints(), loadFailures(), loadQueue(), loadSamplers()]);
  listen({ step: heard, operation: ended, queue: seeQueue, server: seeQueue, sample: soon(loadSamplers, 300), checkpoint: soon(loadCheckpoints, 200), run: soon(loadRun, 500), reset: soon(loadCurves, 200) }, id);
  setInterval(showHead, 5000);
}, "charts");

async function loadCurves() {
  const [metrics, { operations }] = await Promise.all([
    get(here("metrics"), { points: POINTS }), get(here("operations"), { limit: POINTS, status: "done" })]);
  Object.assign(state, { keys: metrics.keys, series: metrics.series });
  for (const operation of operations.reverse()) addTimes(operation);
  showCurves();
  showHead();
}

async function loadRun() {
  state.run = await get(here());
  showHead();
}

async function loadQueue() {
  state.queue = await get(here("queue"));
  showHead();
}

// --- at a glance

function showHead() {
  const { run, queue } = state;
  document.title = `${runName(run)} · Tinsmith`;
  $("title").textContent = runName(run);
  const [kind, text] = statusOf(run, queue);
  if ($("status").textContent !== text) $("status").replaceChildren(pill(kind, text));
  const sampler = run.last_sampler_checkpoint?.tinker_path;
  if (!$("subtitle").firstChild) fill($("subtitle"), code(id), " ", copyButton(id));
  if ($("actions").dataset.for !== String(sampler)) {
    $("actions").dataset.for = String(sampler);
    fill($("actions"),
      sampler && h("a", { class: "button primary", href: `/playground?mode=checkpoint&checkpoint=${encodeURIComponent(sampler)}` }, "Chat"),
      h("a", { class: "button", href: `/compare?runs=${encodeURIComponent(id)}` }, "Compare"),
      h("a", { class: "button", href: `/training_runs/${encodeURIComponent(id)}/operations` }, "Timeline"));
  }
  // Always there: many times a second something begins to wait, and what is below must not move.
  if (queue) $("queue").textContent = `Queue: ${queue.waiting ? `${queue.waiting} waiting, ` : ""}${queue.reason}.`;
  showNumbers();
}

function showNumbers() {
  const loss = state.series.loss;
  const wait = mean(state.series["time/wait"]);
  const compute = mean(state.series["time/compute"]);
  const steps = state.series["optim/step"]?.mean.at(-1);
  const share = wait + compute > 0 ? `${Math.round((100 * compute) / (wait + compute))} %` : "–";
  const cells = [
    ["Optimizer steps", steps === undefined ? "–" : number(steps)],
    ["Loss per token", number(loss?.mean.at(-1)), loss?.mean.length > 1 ? `from ${number(loss.mean[0], 3)}` : ""],
    ["Tokens per second", count(state.series["time/tokens_per_second"]?.mean.at(-1))],
    ["Computing", share, "of the time"],
    ["Queue", state.queue ? number(state.queue.waiting) : "–", state.queue?.place ? `place ${state.queue.place}` : "waiting"],
    ["Last request", since(state.run.last_request_time)],
  ];
  fill($("numbers"), strip(cells));
}

const mean = (series) => (series?.mean.length ? series.mean.reduce((a, b) => a + b, 0) / series.mean.length : 0);

function showConfig() {
  const { run } = state;
  const facts = [
    ["Base model", run.base_model], ["LoRA rank", number(run.lora_rank)], ["LoRA seed", run.lora_seed ?? "–"],
    ["Owner", run.model_owner], ["Last request", clock(run.last_request_time)],
    ...Object.entries(run.user_metadata ?? {}),
  ];
  fill($("config"), terms(facts.map(([name, value]) => [name, String(value)])));
}

// --- curves

function controls() {
  on("smoothing", "input", () => charts.forEach((chart) => chart.set({ smoothing: Number($("smoothing").value) })));
  on("axis", "change", () => charts.forEach((chart) => chart.set({ axis: $("axis").value })));
  on("filter", "input", showCurves);
  on("all", "change", showCurves);
}

function showCurves() {
  const keys = filtered(state.keys, isPosted);
  if (!keys.length) {
    fill($("charts"), state.keys.length ? empty("No metric fits", "Clear the filter to see all.")
      : empty("No steps yet", "Curves appear with the first forward_backward."));
    return;
  }
  const elements = keys.map((key) => chartOf(key).element);
  keys.forEach((key, index) => chartOf(key).widen(index === 0));
  const isShown = elements.length === $("charts").children.length && elements.every((e, i) => e === $("charts").children[i]);
  if (!isShown) fill($("charts"), elements);
  keys.forEach((key) => chartOf(key).update([lineOf(key)], isPosted(key) ? [] : marks()));
}

const isPosted = (key) => state.series[key]?.axis === "step";

const lineOf = (key) => ({ label: key, ...(state.series[key] ?? emptySeries()) });

function chartOf(key) {
  if (!charts.has(key)) {
    const onpick = isPosted(key) ? null : (step) => location.assign(`/training_runs/${encodeURIComponent(id)}/steps/${step}`);
    const chart = new Chart(titleOf(key), { onpick, ...formatsOf(key) });
    chart.set({ smoothing: Number($("smoothing").value), axis: $("axis").value });
    charts.set(key, chart);
  }
  return charts.get(key);
}

/** Checkpoints on the axis, at the last step before each was made. */
function marks() {
  const series = state.series["time/compute"] ?? emptySeries();
  return state.checkpoints.map((checkpoint) => {
    const t = moment(checkpoint.time);
    const index = series.t.findLastIndex((at) => at <= t);
    return { t, x: index < 0 ? null : series.x[index], label: checkpoint.checkpoint_id };
  });
}

/** Whether some of them belong before what was known. */
function add(values, x, t, axis) {
  let isEarlier = false;
  for (const [key, value] of Object.entries(values)) {
    if (!state.keys.includes(key)) state.keys.push(key);
    isEarlier = put((state.series[key] ??= emptySeries(axis)), x, t, typeof value === "number" ? value : null) || isEarlier;
  }
  return isEarlier;
}

function addTimes(operation) {
  add(timesOf(operation), operation.seq, operation.ended, "seq");
}

function heard(step) {
  state.run.last_request_time = Date.now() / 1000;
  const name = (key) => (step.axis === "step" && state.series[key]?.axis === "seq" ? `posted/${key}` : key);
  const isEarlier = add(Object.fromEntries(Object.entries(step.metrics).map(([key, value]) => [name(key), value])), step.seq, step.t, step.axis);
  redraw();
  // A point of a long curve stands for several steps: only the server knows it with this one.
  if (isEarlier || Object.values(state.series).some((series) => series.x.length > 3 * POINTS)) thinOut();
}

function ended(operation) {
  addTimes(operation);
  if (operation.status === "failed") failed();
  redraw();
  seeQueue();
}

const redraw = soon(() => {
  showCurves();
  showHead();
}, 100);
const thinOut = soon(loadCurves, 1000);
const failed = soon(loadFailures, 300);
const seeQueue = soon(loadQueue, 300);

// --- checkpoints and failures

async function loadCheckpoints() {
  [state.run, { checkpoints: state.checkpoints }] = await Promise.all([get(here()), get(here("checkpoints"))]);
  showHead();
  const newest = [...state.checkpoints].sort((a, b) => moment(b.time) - moment(a.time));
  fill($("checkpoints"), newest.length ? table("Checkpoints of this run", [
    ["Name", (c) => checkpointLink(id, c.checkpoint_id), "name"],
    ["Size", (c) => bytes(c.size_bytes), "number"],
    ["Saved", (c) => since(c.time), "nowrap"],
    ["Expires", (c) => (c.expires_at ? until(c.expires_at) : "never"), "nowrap spare"],
  ], newest) : empty("No checkpoints", "save_weights_and_get_sampling_client() or save_state() makes one."));
  $("marks").hidden = !newest.length;
  if (state.keys.length) showCurves();
}

async function loadSamplers() {
  const { samplers } = await get(here("samplers"));
  $("samplers-section").hidden = !samplers.length;
  fill($("samplers"), table("Samplers of this run's weights", [
    ["Weights after", (s) => (s.seq === undefined || s.seq === null ? "a checkpoint" : stepLink(id, s.seq, `operation ${s.seq}`)), "name"],
    ["Sequences", (s) => number(s.sequences), "number"], ["Tokens", (s) => count(s.sampled_tokens), "number"],
    ["Mean length", (s) => number(s.mean_length, 3), "number"], ["Longest", (s) => number(s.longest), "number"],
    ["Ended by themselves", (s) => `${Math.round(100 * s.stopped_fraction)} %`, "number"],
    ["Mean log-probability", (s) => number(s.mean_logprob, 3), "number"], ["Last", (s) => since(s.last), "nowrap"],
  ], samplers));
}

async function loadFailures() {
  const { operations } = await get(here("operations"), { status: "failed", limit: MOST_FAILURES });
  $("failed").hidden = !operations.length;
  const many = operations.length === MOST_FAILURES ? `${MOST_FAILURES} operations or more have` : operations.length === 1 ? "An operation has" : `${operations.length} operations have`;
  fill($("failed"), `${many} failed. `, link("#failures-title", "See why"));
  fill($("failures"), operations.length ? table("Failed operations", [
    ["Operation", (o) => stepLink(id, o.seq, number(o.seq)), "number"], ["Kind", (o) => code(o.kind)],
    ["When", (o) => clock(o.ended), "nowrap"], ["After", (o) => duration(o.ended - (o.started ?? o.submitted)), "number"],
    ["Error", (o) => o.error, "error"],
  ], operations) : h("p", { class: "muted" }, "No operation of this run has failed."));
}
