import { get, path, send, toLogin } from "../api.js";
import { $, code, confirm, empty, fill, h, notify, on, pill, second, since, table } from "../dom.js";
import { clock, number, until } from "../format.js";
import { reload } from "../live.js";
import { page } from "../shell.js";

const wanted = location.pathname.split("/")[2];

page(async () => {
  if (new URLSearchParams(location.search).get("new_key")) {
    const name = new URLSearchParams(location.search).get("key_name") || "laptop";
    $("new").hidden = false;
    fill($("new"), "Keys are made on the server's machine, so that none passes through a browser: ", code(`tinsmith key create --name ${name.replace(/[^\w.-]/g, "_")}`));
  }
  on("day", "change", loadAudit);
  await Promise.all([loadKeys(), loadAudit()]);
  reload(() => Promise.all([loadKeys(), loadAudit()]), ["key", "checkpoint"]);
}, "keys");

async function loadKeys() {
  const { keys } = await get("/api/v1/console/keys");
  fill($("keys"), keys.length ? table("Keys of your account", [
    ["No.", (k) => number(k.key_id), "number"],
    ["Name", (k) => [String(k.key_id) === wanted ? h("strong", {}, k.name) : k.name, k.is_current ? [" ", pill("good", "This browser's")] : null, second(k.note)], "name"],
    ["Status", statusOf],
    ["Made", (k) => since(k.created), "nowrap spare"],
    [h("span", { class: "visually-hidden" }, "Actions"), (k) => (isGood(k) ? h("button", { class: "small", "aria-label": `Revoke ${k.name}`, onclick: () => revoke(k) }, "Revoke") : null)],
  ], keys) : empty("No keys", "This server runs without authentication."));
}

const isGood = (key) => !key.revoked && !(key.expires && key.expires < Date.now() / 1000);

function statusOf(key) {
  if (key.revoked) return [pill("", "Revoked"), second([since(key.revoked)])];
  if (!isGood(key)) return pill("", "Expired");
  return [pill("good", "Good"), key.expires && second(`expires ${until(key.expires)}`)];
}

async function revoke(key) {
  const body = h("p", {}, key.is_current ? "You are signed in with this key: this page ends with it, and so does every program that uses it." : "Every program and every browser that uses it is shut out at once.");
  if (!(await confirm(`Revoke the key “${key.name}”?`, body, "Revoke"))) return;
  try {
    await send("DELETE", path("console", "keys", String(key.key_id)));
  } catch (error) {
    return notify(error.message, "bad");
  }
  if (key.is_current) return toLogin("ended");
  notify(`The key ${key.name} is revoked.`);
  await loadKeys();
}

async function loadAudit() {
  const { entries } = await get("/api/v1/console/audit", { day: $("day").value });
  fill($("audit"), entries.length ? table("Entries of the audit log", [
    ["When", (e) => clock(e.timestamp), "nowrap"],
    ["Event", (e) => code(e.event)],
    ["What", (e) => [e.tinker_path ? code(e.tinker_path) : e.model_id ? code(e.model_id) : null, second(Object.entries(e.event_details ?? {}).map(([k, v]) => `${k}: ${typeof v === "object" ? JSON.stringify(v) : v}`).join(", "))], "name"],
  ], entries) : empty("No entries", $("day").value ? "Nothing was done on that day." : "Publishing, deleting and copying of checkpoints is written down here."));
}
