import { ApiError, get, path } from "../api.js";
import { chatWith, download, publish, remove, setExpiry } from "../checkpoint_actions.js";
import { $, checkpointLink, code, copyButton, fill, h, notify, pill, runLink, terms } from "../dom.js";
import { ago, bytes, clock, moment, runName, until } from "../format.js";
import { reload } from "../live.js";
import { page } from "../shell.js";

const [run, ...rest] = location.pathname.split("/").slice(2).map(decodeURIComponent);
const name = rest.join("/");
const DAY = 86400;

page(async () => {
  await load();
  reload(() => load().catch(gone), ["checkpoint"], run);
}, "facts");

async function load() {
  const [details, { checkpoints }] = await Promise.all([get(path("training_runs", run)), get(path("training_runs", run, "checkpoints"))]);
  const checkpoint = checkpoints.find((c) => c.checkpoint_id === name);
  if (!checkpoint) throw new ApiError(404, `the run has no checkpoint ${name}; it may have expired or been deleted`);
  document.title = `${name} · Tinsmith`;
  $("title").textContent = name;
  show(checkpoint, details);
  lineage(checkpoint, checkpoints, details);
}

/** It was deleted, or has expired, since the page was opened. */
function gone(error) {
  fill($("actions"));
  fill($("facts"), terms([["Now", [pill("bad", "Gone"), " ", error.message]]]));
}

function show(checkpoint, details) {
  fill($("actions"),
    checkpoint.checkpoint_type === "sampler" ? h("a", { class: "button primary", href: chatWith(checkpoint) }, "Chat") : null,
    act("Download", () => download(checkpoint)),
    act(checkpoint.public ? "Make private" : "Publish", () => publish(checkpoint, !checkpoint.public), () => show(checkpoint, details)),
    act("Delete", async () => {
      if ((await remove([checkpoint])).length) location.replace("/checkpoints");
    }));
  const expiry = h("select", { "aria-label": "Expires", onchange: async (event) => {
    await act("", () => setExpiry(checkpoint, event.target.value === "" ? null : Number(event.target.value))).onact();
    show(checkpoint, details);
    notify("The expiry is changed.");
  } }, h("option", { value: "keep", selected: true, disabled: true }, "Change …"), [["", "never"], [DAY, "in a day"], [7 * DAY, "in a week"], [30 * DAY, "in 30 days"]].map(([value, text]) => h("option", { value: String(value) }, text)));
  const facts = [
    ["Path", [code(checkpoint.tinker_path), " ", copyButton(checkpoint.tinker_path)]],
    ["Run", runLink(run, runName(details))],
    ["Base model", `${details.base_model}, LoRA rank ${details.lora_rank}`],
    ["For", checkpoint.checkpoint_type === "training" ? "training on: weights and optimizer" : "sampling: weights"],
    ["Size", bytes(checkpoint.size_bytes)],
    ["Saved", `${clock(checkpoint.time)}, ${ago(checkpoint.time)}`],
    ["Expires", [checkpoint.expires_at ? `${clock(checkpoint.expires_at)}, ${until(checkpoint.expires_at)}` : "never", " ", expiry]],
    ["Readable by", checkpoint.public ? pill("warn", "Everybody") : "you"],
    ...Object.entries(checkpoint.user_metadata ?? {}),
  ];
  fill($("facts"), terms(facts));
}

/** A button that says what went wrong; `then` is done after it went well. */
function act(label, work, then) {
  const onact = async () => {
    try {
      await work();
      then?.();
    } catch (error) {
      notify(error.message, "bad");
    }
  };
  return Object.assign(h("button", { onclick: onact }, label), { onact });
}

function lineage(checkpoint, checkpoints, details) {
  const ordered = [...checkpoints].sort((a, b) => moment(a.time) - moment(b.time));
  fill($("lineage"), h("li", {}, h("span", {}, details.base_model), h("span", { class: "second muted" }, "base model")),
    ordered.map((c) => h("li", { "aria-current": c === checkpoint ? "true" : null },
      c === checkpoint ? h("strong", {}, c.checkpoint_id) : checkpointLink(run, c.checkpoint_id),
      h("span", { class: "second muted" }, `${ago(c.time)}, ${bytes(c.size_bytes)}`))));
}
