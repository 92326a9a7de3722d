import { get, path } from "../api.js";
import { $, bar, code, empty, fill, h, on, runLink, stepLink, table } from "../dom.js";
import { clock, count, duration, number, runName } from "../format.js";
import { reload } from "../live.js";
import { statusPill } from "../operation_status.js";
import { page } from "../shell.js";

const id = decodeURIComponent(location.pathname.split("/")[2]);
const PAGE = 200;
let operations = [];
let isMore = false;

page(async () => {
  const run = await get(path("training_runs", id));
  document.title = `Timeline of ${runName(run)} · Tinsmith`;
  fill($("crumb"), runLink(id, runName(run)));
  on("status", "change", () => load());
  on("more", "click", () => load(operations.at(-1)?.seq));
  await load();
  reload(() => load(), ["operation", "queue"], id);
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
    ["Kind", (o) => code(o.kind), "name"],
    ["Status", statusOf],
    ["Waited", (o) => duration((o.started ?? o.ended ?? now) - o.submitted), "number"],
    ["Computed", (o) => (o.started ? duration((o.ended ?? now) - o.started) : "–"), "number"],
    ["Tokens", (o) => (o.tokens ? count(o.tokens) : "–"), "number"],
    ["When", (o) => times(o, first, last, now), "when"],
  ], operations));
}

const statusOf = (operation) => [statusPill(operation), operation.error ? h("span", { class: "second error" }, operation.error) : null];

/** Waiting and computing on the common axis of time. */
function times(operation, first, last, now) {
  const at = (moment) => ((moment - first) / Math.max(last - first, 1e-6)) * 1000;
  const started = operation.started ?? operation.ended ?? now;
  const parts = [["wait", at(operation.submitted), at(started)]];
  if (operation.started) parts.push(["run", at(started), Math.max(at(operation.ended ?? now), at(started) + 8)]);
  return bar(parts);
}
