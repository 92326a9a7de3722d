import { get } from "../api.js";
import { $, empty, fill, h, pill, runLink, strip, table, terms } from "../dom.js";
import { bytes, duration, number } from "../format.js";
import { listen, soon } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";

const EVERY_MS = 5000;
const FOR = { both: "training and sampling", train: "training", sample: "sampling" };

page(async () => {
  await load();
  setInterval(() => load().catch(() => {}), EVERY_MS);
  listen({ operation: soon(load, 500) });
}, "numbers");

async function load() {
  const [server, { slots }, nameOf] = await Promise.all([get("/api/v1/console/server"), get("/api/v1/cluster"), runNames()]);
  const isReady = server.status === "ready";
  fill($("status"), pill(isReady ? "good" : "bad", isReady ? "Ready" : "Not ready"));
  $("trouble").hidden = isReady;
  $("trouble").textContent = isReady ? "" : `The server is not ready: ${server.status}.`;
  const cells = [
    ["Up for", duration(Date.now() / 1000 - server.started)], ["Engine restarts", number(server.restarts)],
    ["Engine's memory", bytes(server.memory_bytes)], ["Samples running", number(server.running_samples)],
    ["Your runs at work", number(server.queues.length)],
  ];
  fill($("numbers"), strip(cells));
  fill($("facts"), terms([["Version", server.version], ["Address", server.url], ["Device", server.device]]));
  fill($("models"), table("Base models and whether they are served", [
    ["Base model", ({ name }) => name, "name"],
    ["Status", ({ reason }) => (reason ? [pill("bad", "Refused"), h("span", { class: "second" }, reason)] : pill("good", "Served"))],
  ], [...server.models.map((name) => ({ name })), ...server.refused_models]));
  fill($("slots"), table("Engines, one in each slot", [
    ["Slot", (s) => String(s.slot)], ["For", (s) => FOR[s.role]], ["Device", (s) => s.device],
    ["State", (s) => [pill(s.state === "up" ? "good" : "warn", s.state), s.detail ? h("span", { class: "second" }, s.detail) : null]],
    ["Models", (s) => number(s.models), "number"], ["Samples", (s) => number(s.running_samples), "number"],
    ["Memory", (s) => bytes(s.memory_bytes), "number"], ["Restarts", (s) => number(s.restarts), "number"],
  ], slots));
  fill($("queues"), server.queues.length ? table("Queue per run", [
    ["Run", (q) => runLink(q.run, nameOf(q.run)), "name"],
    ["Now", (q) => (q.is_running ? pill("good", "Running") : pill("warn", "Waiting"))],
    ["Waiting", (q) => number(q.waiting), "number"], ["Place", (q) => number(q.place), "number"],
    ["Why", (q) => q.reason, "reason"],
  ], server.queues) : empty("Nothing is waiting", "Runs with operations under way are listed here, each with what it waits for."));
}
