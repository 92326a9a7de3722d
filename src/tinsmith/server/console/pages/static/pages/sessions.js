import { send } from "../api.js";
import { $, code, empty, fill, h, link, pill, table } from "../dom.js";
import { ago, bytes, number } from "../format.js";
import { page } from "../shell.js";

const sessions = [];
let cursor = null;

page(async () => {
  $("search").addEventListener("input", show);
  $("more").addEventListener("click", load);
  await load();
}, "sessions");

async function load() {
  const found = await send("POST", "/api/v1/sessions/search", { limit: 50, ...(cursor && { cursor }) });
  sessions.push(...found.sessions);
  cursor = found.next_cursor;
  show();
}

function show() {
  const wanted = $("search").value.trim().toLowerCase();
  const found = sessions.filter((session) => JSON.stringify([session.session_id, session.display_name, session.user_metadata]).toLowerCase().includes(wanted));
  $("more").hidden = !cursor;
  if (!sessions.length) return fill($("sessions"), empty("No sessions yet", "Each ServiceClient begins one; its runs and samplers are listed in it."));
  if (!found.length) return fill($("sessions"), empty("No session fits", "Sessions are searched by id, name and metadata."));
  fill($("sessions"), table("Sessions", [
    ["Session", (s) => [link(`/sessions/${encodeURIComponent(s.session_id)}`, s.display_name || s.session_id), s.display_name ? h("code", { class: "second" }, s.session_id) : null], "name"],
    ["Status", statusOf],
    ["Metadata", (s) => h("div", { class: "tags" }, Object.entries(s.user_metadata ?? {}).map(([k, v]) => h("span", { class: "tag" }, `${k}: ${v.slice(0, 80)}`))), "spare"],
    ["Checkpoints", (s) => number(s.checkpoints_count), "number"],
    ["Stored", (s) => bytes(s.checkpoint_storage_bytes), "number"],
    ["Begun", (s) => ago(s.created_at), "nowrap"],
  ], found));
}

function statusOf({ status }) {
  if (status?.type === "active") return pill("good", "Active");
  const reason = status?.reason?.type;
  if (reason === "errored") return [pill("bad", "Ended with an error"), status.detail ? h("span", { class: "second" }, status.detail) : null];
  return pill("", reason === "interrupted" ? "Interrupted" : "Ended");
}
