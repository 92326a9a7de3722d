import { send } from "../api.js";
import { $, empty, fill, h, link, on, pill, second, since, table, typed } from "../dom.js";
import { bytes, number } from "../format.js";
import { reload } from "../live.js";
import { page } from "../shell.js";

const sessions = new Map();
let cursor = null;

page(async () => {
  on("search", "input", show);
  on("more", "click", () => load({ cursor }));
  await load();
  reload(load, ["session", "checkpoint"]);
}, "sessions");

/** The newest ones, or those after a cursor. What is known of the others stays. */
async function load(after) {
  const found = await send("POST", "/api/v1/sessions/search", { limit: 50, ...after });
  if (after || !sessions.size) cursor = found.next_cursor;
  for (const session of found.sessions) sessions.set(session.session_id, session);
  show();
}

function show() {
  const wanted = typed("search");
  const newestFirst = [...sessions.values()].sort((a, b) => new Date(b.created_at) - new Date(a.created_at));
  const found = newestFirst.filter((session) => JSON.stringify([session.session_id, session.display_name, session.user_metadata]).toLowerCase().includes(wanted));
  $("more").hidden = !cursor;
  if (!sessions.size) return fill($("sessions"), empty("No sessions yet", "Each ServiceClient begins one; its runs and samplers are listed in it."));
  if (!found.length) return fill($("sessions"), empty("No session fits", "Sessions are searched by id, name and metadata."));
  fill($("sessions"), table("Sessions", [
    ["Session", (s) => [link(`/sessions/${encodeURIComponent(s.session_id)}`, s.display_name || s.session_id), s.display_name && second(s.session_id, "code")], "name"],
    ["Status", statusOf],
    ["Metadata", (s) => h("div", { class: "tags" }, Object.entries(s.user_metadata ?? {}).map(([k, v]) => h("span", { class: "tag" }, `${k}: ${v.slice(0, 80)}`))), "spare"],
    ["Checkpoints", (s) => number(s.checkpoints_count), "number"],
    ["Stored", (s) => bytes(s.checkpoint_storage_bytes), "number"],
    ["Begun", (s) => since(s.created_at), "nowrap"],
  ], found));
}

function statusOf({ status }) {
  if (status?.type === "active") return pill("good", "Active");
  const reason = status?.reason?.type;
  if (reason === "errored") return [pill("bad", "Ended with an error"), second(status.detail)];
  return pill("", reason === "interrupted" ? "Interrupted" : "Ended");
}
