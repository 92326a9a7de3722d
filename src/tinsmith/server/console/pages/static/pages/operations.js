import { get, path } from "../api.js";
import { $, code, empty, fill, h, runLink, stepLink, table } from "../dom.js";
import { clock, count, duration, number, runName } from "../format.js";
import { listen, soon } from "../live.js";
import { statusPill } from "../operation_status.js";
import { page } from "../shell.js";

const id = decodeURIComponent(location.pathname.split("/")[2]);
const PAGE = 200;
const WIDTH = 1000;
let operations = [];
let isMore = false;

page(async () => {
  const run = await get(path("training_runs", id));
  document.title = `Timeline of ${runName(run)} · Tinsmith`;
  fill($("crumb"), runLink(id, runName(run)));
  $("status").addEventListener("change", () => load());
  $("more").addEventListener("click", () => load(operations.at(-1)?.seq));
  await load();
  listen({ operation: soon(() => load(), 300) }, id);
}, "operations");

async function load(before) {
  const found = (await get(path("training_runs", id, "operations"), { limit: PAGE, before, status: $("status").value })).operations;
  operations = before === undefined ? found : [...operations, ...found];
  isMore = found.length === PAGE;
  show();
}

function show() {
  $("more").hidden = !isMore;
  if (!operations.length) return fill($("operations"), empty("No operations", $("status").value ? "None has this status." : "They appear when the client sends the first."));
  const now = Date.now() / 1000;
  const first = Math.min(...operations.map((o) => o.submitted));
  const last = Math.max(...operations.map((o) => o.ended ?? now));
  $("span").textContent = `${clock(first)} to ${clock(last)}, ${duration(last - first)}`;
  fill($("operations"), table("Operations, newest first", [
    ["No.", (o) => stepLink(id, o.seq, number(o.seq)), "number"],
    ["Kind", (o) => code(o.kind), "nowrap"],
    ["Status", statusOf],
    ["Waited", (o) => duration((o.started ?? o.ended ?? now) - o.submitted), "number"],
    ["Computed", (o) => (o.started ? duration((o.ended ?? now) - o.started) : "–"), "number"],
    ["Tokens", (o) => (o.tokens ? count(o.tokens) : "–"), "number"],
    ["When", (o) => bar(o, first, last, now), "when"],
  ], operations));
}

const statusOf = (operation) => [statusPill(operation), operation.error ? h("span", { class: "second error" }, operation.error) : null];

/** Waiting and computing on the common axis of time. */
function bar(operation, first, last, now) {
  const scale = WIDTH / Math.max(last - first, 1e-6);
  const started = operation.started ?? operation.ended ?? now;
  const ended = operation.ended ?? now;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ class: "bar", viewBox: `0 0 ${WIDTH} 8`, preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
  const part = (kind, from, to) => {
    const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [name, value] of Object.entries({ class: kind, x: (from - first) * scale, width: Math.max((to - from) * scale, kind === "run" ? 8 : 0), height: 8 })) rect.setAttribute(name, value);
    svg.append(rect);
  };
  part("back", first, last);
  part("wait", operation.submitted, started);
  if (operation.started) part("run", started, ended);
  return svg;
}
