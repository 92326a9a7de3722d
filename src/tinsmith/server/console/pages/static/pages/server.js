import { get } from "../api.js";
import { $, empty, fill, pill, runLink, second, strip, table, terms } from "../dom.js";
import { bytes, duration, number } from "../format.js";
import { reload } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";

const EVERY_MS = 5000;
const FOR = { both: "training and sampling", train: "training", sample: "sampling" };
const STORES = { s3: "an S3 bucket", gs: "a Google Cloud bucket", az: "an Azure container", file: "a shared folder" };

page(async () => {
  await load();
  setInterval(() => load().catch(() => {}), EVERY_MS);
  reload(load, ["operation", "queue", "sample", "server"]);
}, "numbers");

async function load() {
  const [server, { slots, nodes, trouble }, nameOf] = await Promise.all([get("/api/v1/console/server"), get("/api/v1/cluster"), runNames()]);
  const isReady = server.status === "ready";
  fill($("status"), pill(isReady ? "good" : "bad", isReady ? "Ready" : "Not ready"));
  const problem = isReady ? trouble : `The server is not ready: ${server.status}.`;
  $("trouble").hidden = !problem;
  $("trouble").textContent = problem;
  const cells = [
    ["Up for", duration(Date.now() / 1000 - server.started)], ["Engine restarts", number(server.restarts)],
    ["Engine's memory", bytes(server.memory_bytes)], ["Samples running", number(server.running_samples)],
    ["Your runs at work", number(server.queues.length)],
  ];
  fill($("numbers"), strip(cells));
  fill($("facts"), terms([
    ["Version", server.version],
    ["Address", server.epoch ? [server.url, second("Leads the servers of this store")] : server.url],
    ["Device", server.device], ["Weights are kept in", STORES[server.storage] ?? "the server's data folder"],
    ["Log-probabilities", server.on_policy === "exact" ? "of sampler and trainer agree to the last bit" : "of sampler and trainer are close"],
  ]));
  fill($("models"), table("Base models and whether they are served", [
    ["Base model", ({ name }) => name, "name"],
    ["Status", ({ reason }) => (reason ? [pill("bad", "Refused"), second(reason)] : pill("good", "Served"))],
  ], [...server.models.map((name) => ({ name })), ...server.refused_models]));
  fill($("slots"), table("Engines, one in each slot", [
    ["Slot", (s) => String(s.slot)],
    ["State", (s) => [pill(s.state === "up" ? "good" : "warn", s.state[0].toUpperCase() + s.state.slice(1)), second(s.detail)]],
    ["For", (s) => FOR[s.role], "nowrap"], 
    ["Device", (s) => [s.device, second([s.ranks > 1 && `${s.ranks} ranks`, s.host && `on ${s.host}`].filter(Boolean).join(", "))], "reason"],
    ["Models", (s) => number(s.models), "number"], ["Samples", (s) => number(s.running_samples), "number"],
    ["Memory", (s) => [bytes(s.memory_bytes), second(parts(s))], "number"], ["Restarts", (s) => number(s.restarts), "number"],
  ], slots));
  $("nodes-section").hidden = !nodes.length;
  fill($("nodes"), table("Machines", [
    ["Machine", (n) => [n.address, second(n.node.slice(0, 12))], "name"],
    ["State", (n) => (n.is_alive ? pill("good", "Alive") : pill("bad", "Gone"))],
    ["Cores", (n) => number(n.cpus), "number"], ["GPUs", (n) => number(n.gpus), "number"], ["Memory", (n) => bytes(n.memory_bytes), "number"],
  ], nodes));
  fill($("queues"), server.queues.length ? table("Queue per run", [
    ["Run", (q) => runLink(q.run, nameOf(q.run)), "name"],
    ["Now", (q) => (q.is_running ? pill("good", "Running") : pill("warn", "Waiting"))],
    ["Waiting", (q) => number(q.waiting), "number"], ["Place", (q) => number(q.place), "number"],
    ["Why", (q) => q.reason, "reason"],
  ], server.queues) : empty("Nothing is waiting", "Runs with operations under way are listed here, each with what it waits for."));
}

/** What an engine's memory holds, of how much. */
const parts = (slot) => [["base", slot.weights_bytes], ["adapters", slot.adapter_bytes, slot.adapter_limit_bytes], ["cache", slot.cache_bytes, slot.cache_limit_bytes]]
  .filter(([, used, most]) => used || most).map(([name, used, most]) => `${name} ${bytes(used)}${most ? ` of ${bytes(most)}` : ""}`).join(" · ");
