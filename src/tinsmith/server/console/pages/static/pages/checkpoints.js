import { get } from "../api.js";
import { chatWith, pageOf, remove, runOf } from "../checkpoint_actions.js";
import { $, empty, fill, h, link, on, pill, runLink, since, table, typed } from "../dom.js";
import { bytes, number, shortId, until } from "../format.js";
import { reload } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";

const PAGE = 500;
const chosen = new Set(); // tinker paths
let checkpoints = [];
let total = 0;
let nameOf = shortId;

page(async () => {
  for (const id of ["search", "kind"]) $(id).addEventListener("input", show);
  on("delete", "click", async () => {
    const gone = new Set((await remove(checkpoints.filter((c) => chosen.has(c.tinker_path)))).map((c) => c.tinker_path));
    gone.forEach((path) => chosen.delete(path));
    checkpoints = checkpoints.filter((c) => !gone.has(c.tinker_path));
    total -= gone.size;
    show();
  });
  on("more", "click", () => load(checkpoints.length));
  await load();
  nameOf = await runNames();
  show();
  reload(load, ["checkpoint"]);
}, "checkpoints");

async function load(offset = 0) {
  const found = await get("/api/v1/checkpoints", { limit: PAGE, offset });
  checkpoints = offset ? [...checkpoints, ...found.checkpoints] : found.checkpoints;
  total = found.cursor?.total_count ?? checkpoints.length;
  show();
}

function shown() {
  const wanted = typed("search");
  return checkpoints.filter((c) => `${c.tinker_path} ${nameOf(runOf(c))}`.toLowerCase().includes(wanted) && (!$("kind").value || c.checkpoint_type === $("kind").value));
}

function show() {
  const found = shown();
  $("more").hidden = checkpoints.length >= total;
  $("count").textContent = total ? `${number(total)} · ${bytes(checkpoints.reduce((sum, c) => sum + c.size_bytes, 0))}` : "";
  actions();
  if (!checkpoints.length) return fill($("checkpoints"), empty("No checkpoints", "save_state() makes one to train on from, save_weights_for_sampler() one to sample from."));
  if (!found.length) return fill($("checkpoints"), empty("No checkpoint fits", "Checkpoints are searched by path and by the name of their run."));
  const all = h("input", { type: "checkbox", "aria-label": "Choose all shown", checked: found.every((c) => chosen.has(c.tinker_path)), onchange: (event) => {
    for (const c of found) if (event.target.checked) chosen.add(c.tinker_path); else chosen.delete(c.tinker_path);
    show();
  } });
  fill($("checkpoints"), table("Checkpoints", [
    [all, pick, "pick"],
    ["Checkpoint", (c) => [link(pageOf(c), c.checkpoint_id), c.public ? [" ", pill("warn", "Public")] : null], "name"],
    ["Run", (c) => runLink(runOf(c), nameOf(runOf(c))), "run"],
    ["For", (c) => (c.checkpoint_type === "training" ? "training" : "sampling"), "spare"],
    ["Size", (c) => bytes(c.size_bytes), "number"],
    ["Saved", (c) => since(c.time), "nowrap spare"],
    ["Expires", (c) => (c.expires_at ? until(c.expires_at) : "never"), "nowrap spare"],
    [h("span", { class: "visually-hidden" }, "Actions"), (c) => (c.checkpoint_type === "sampler" ? h("a", { class: "button small", href: chatWith(c), "aria-label": `Chat with ${c.checkpoint_id}` }, "Chat") : null)],
  ], found));
}

function actions() {
  const picked = checkpoints.filter((c) => chosen.has(c.tinker_path));
  $("delete").disabled = !picked.length;
  $("delete").textContent = picked.length ? `Delete ${picked.length} (${bytes(picked.reduce((sum, c) => sum + c.size_bytes, 0))})` : "Delete chosen";
  const talkers = picked.filter((c) => c.checkpoint_type === "sampler").slice(0, 3);
  $("versus").hidden = talkers.length < 2;
  $("versus").href = `/playground?${new URLSearchParams(talkers.map((c) => ["model", c.tinker_path]))}`;
}

const pick = (c) => h("input", { type: "checkbox", checked: chosen.has(c.tinker_path), "aria-label": `Choose ${c.checkpoint_id} of ${shortId(runOf(c))}`, onchange: (event) => {
  if (event.target.checked) chosen.add(c.tinker_path);
  else chosen.delete(c.tinker_path);
  actions();
} });
