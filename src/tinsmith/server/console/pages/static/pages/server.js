import { get } from "../api.js";
import { $, empty, fill, h, link, pill, table } from "../dom.js";
import { bytes, duration, number } from "../format.js";
import { listen, soon } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";

const EVERY_MS = 5000;

page(async () => {
  await load();
  setInterval(() => load().catch(() => {}), EVERY_MS);
  listen({ operation: soon(load, 500) });
}, "numbers");

async function load() {
  const [server, nameOf] = await Promise.all([get("/api/v1/console/server"), runNames()]);
  const isReady = server.status === "ready";
  fill($("status"), pill(isReady ? "good" : "bad", isReady ? "Ready" : "Not ready"));
  $("trouble").hidden = isReady;
  $("trouble").textContent = isReady ? "" : `The server is not ready: ${server.status}.`;
  const cells = [
    ["Up for", duration(Date.now() / 1000 - server.started)], ["Engine restarts", number(server.restarts)],
    ["Engine's memory", bytes(server.memory_bytes)], ["Samples running", number(server.running_samples)],
    ["Your runs at work", number(server.queues.length)],
  ];
  fill($("numbers"), cells.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  fill($("facts"), [["Version", server.version], ["Address", server.url], ["Device", server.device]].map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  fill($("models"), table("Base models and whether they are served", [
    ["Base model", ({ name }) => name, "name"],
    ["Status", ({ reason }) => (reason ? [pill("bad", "Refused"), h("span", { class: "second" }, reason)] : pill("good", "Served"))],
  ], [...server.models.map((name) => ({ name })), ...server.refused_models]));
  fill($("queues"), server.queues.length ? table("Queue per run", [
    ["Run", (q) => link(`/training_runs/${encodeURIComponent(q.run)}`, nameOf(q.run)), "name"],
    ["Now", (q) => (q.is_running ? pill("good", "Running") : pill("warn", "Waiting"))],
    ["Waiting", (q) => number(q.waiting), "number"], ["Place", (q) => number(q.place), "number"],
    ["Why", (q) => q.reason, "reason"],
  ], server.queues) : empty("Nothing is waiting", "Runs with operations under way are listed here, each with what it waits for."));
}
