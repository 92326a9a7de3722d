// What can be done with checkpoints; each asks first where it cannot be undone.

import { get, path, send } from "./api.js";
import { confirm, h, notify } from "./dom.js";

export const runOf = (checkpoint) => checkpoint.tinker_path.slice("tinker://".length).split("/")[0];

const pathOf = (checkpoint, ...more) => path("training_runs", runOf(checkpoint), "checkpoints", ...checkpoint.checkpoint_id.split("/"), ...more);

export const pageOf = (checkpoint) => `/checkpoints/${encodeURIComponent(runOf(checkpoint))}/${encodeURIComponent(checkpoint.checkpoint_id)}`;

export const chatWith = (checkpoint) => `/playground?mode=checkpoint&checkpoint=${encodeURIComponent(checkpoint.tinker_path)}`;

/** Delete many. Resolves to those that are gone. */
export async function remove(checkpoints) {
  const one = checkpoints.length === 1;
  const list = h("ul", { tabindex: "0", "aria-label": "Checkpoints to delete" }, checkpoints.map((c) => h("li", {}, h("code", {}, c.tinker_path))));
  const title = one ? "Delete this checkpoint?" : `Delete ${checkpoints.length} checkpoints?`;
  const note = h("p", { class: "muted" }, "Whoever runs the server can restore them from its trash for a while: ", h("code", {}, "tinsmith storage restore"), ".");
  if (!(await confirm(title, [list, note], one ? "Delete" : `Delete ${checkpoints.length}`))) return [];
  const gone = [];
  for (const checkpoint of checkpoints) {
    try {
      await send("DELETE", pathOf(checkpoint));
      gone.push(checkpoint);
    } catch (error) {
      notify(`${checkpoint.checkpoint_id} is not deleted: ${error.message}`, "bad");
    }
  }
  if (gone.length) notify(gone.length === 1 ? `${gone[0].checkpoint_id} is deleted.` : `${gone.length} checkpoints are deleted.`);
  return gone;
}

export async function publish(checkpoint, isPublic) {
  await send(isPublic ? "POST" : "DELETE", pathOf(checkpoint, "publish"));
  checkpoint.public = isPublic;
  notify(isPublic ? "Everybody with a key of this server can read it now." : "Only you can read it now.");
}

/** `seconds` from now, or null for never. */
export async function setExpiry(checkpoint, seconds) {
  await send("PUT", pathOf(checkpoint, "ttl"), { ttl_seconds: seconds });
  checkpoint.expires_at = seconds === null ? null : Date.now() / 1000 + seconds;
}

export async function download(checkpoint) {
  const { url } = await get(pathOf(checkpoint, "archive"));
  location.assign(url);
}
