import { get } from "../api.js";
import { $, closing, code, copyButton, dialog, empty, fill, h, notify, on } from "../dom.js";
import { reload } from "../live.js";
import { runNames } from "../run_names.js";
import { page } from "../shell.js";
import { curl, python } from "../snippets.js";
import { stream } from "../stream.js";
import { classOf, hideCard, token, tokenBlock, toldOf } from "../tokens.js";

const MOST_LANES = 3;
const ALTERNATIVES = 5;
const state = { isChat: true, models: [], lanes: [], exchanges: [], prompt: "" };
/* An exchange is {user, replies}; a reply belongs to a lane: {text, block, finish, isDone}. */
let running = new Set(); // the AbortController of each answer under way

page(async () => {
  const query = new URLSearchParams(location.search);
  await loadModels();
  const wanted = [...query.getAll("checkpoint"), ...query.getAll("model")].slice(0, MOST_LANES);
  state.lanes = wanted.length ? wanted : state.models.slice(-1);
  if (query.get("as") === "completion") setMode(false);
  if (!state.lanes.length) return fill($("lanes"), empty("No model to talk to", "This server serves no model that can be sampled; see the ", h("a", { href: "/server" }, "server"), " page."));
  controls();
  show();
  $("prompt").focus();
  reload(async () => {
    await loadModels();
    document.querySelectorAll(".lane-head").forEach((head, lane) => head.replaceWith(laneHead(state.lanes[lane], lane)));
  }, ["checkpoint"]);
}, "lanes");

async function loadModels() {
  const [served, nameOf] = await Promise.all([get("/oai/api/v1/models"), runNames()]);
  Object.assign(state, { models: served.data.map((model) => model.id), nameOf });
}

// --- controls

function controls() {
  on("chat-mode", "click", () => setMode(true));
  on("completion-mode", "click", () => setMode(false));
  on("add-model", "click", () => {
    state.lanes.push(state.models.find((model) => !state.lanes.includes(model)) ?? state.lanes[0]);
    for (const exchange of state.exchanges) exchange.replies.push(newReply());
    keep();
  });
  on("clear", "click", () => {
    stopAll();
    state.exchanges = [];
    show();
  });
  on("copy-as", "click", showCode);
  on("stop-all", "click", stopAll);
  on("colours", "change", () => {
    document.body.classList.toggle("plain-tokens", !$("colours").checked);
    $("scale").hidden = !$("colours").checked;
  });
  for (const id of ["temperature", "top-p", "max-tokens", "seed", "stop", "system"]) $(id).addEventListener("input", summarise);
  on("composer", "submit", (event) => {
    event.preventDefault();
    submit();
  });
  on("prompt", "keydown", (event) => {
    const sends = state.isChat ? !event.shiftKey : event.ctrlKey || event.metaKey;
    if (event.key === "Enter" && sends && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  addEventListener("keydown", (event) => event.key === "Escape" && stopAll());
  summarise();
}

function setMode(isChat) {
  stopAll();
  state.isChat = isChat;
  state.exchanges = [];
  $("chat-mode").setAttribute("aria-pressed", String(isChat));
  $("completion-mode").setAttribute("aria-pressed", String(!isChat));
  $("system-field").hidden = !isChat;
  $("send").textContent = isChat ? "Send" : "Complete";
  $("prompt-label").textContent = isChat ? "Message" : "Text to complete";
  $("prompt").placeholder = isChat ? "Write a message. Enter sends it, Shift and Enter begin a new line." : "Write the beginning of a text. Control and Enter complete it.";
  keep();
}

/** Show, and let the address lead back here. */
function keep() {
  const query = new URLSearchParams(state.lanes.map((model) => ["model", model]));
  if (!state.isChat) query.set("as", "completion");
  history.replaceState(null, "", `/playground?${query}`);
  show();
}

function summarise() {
  const parts = [`temperature ${$("temperature").value || 1}`, `at most ${$("max-tokens").value} tokens`];
  if ($("seed").value) parts.push(`seed ${$("seed").value}`);
  if ($("system").value && state.isChat) parts.push("system prompt");
  $("options-summary").textContent = parts.join(" · ");
}

function stopAll() {
  running.forEach((controller) => controller.abort());
}

// --- asking

function submit() {
  const text = $("prompt").value;
  if (!text.trim() || running.size) return;
  if (state.isChat) {
    state.exchanges.push({ user: text, replies: state.lanes.map(newReply) });
    $("prompt").value = "";
  } else state.exchanges = [{ user: text, replies: state.lanes.map(newReply) }];
  answerExchange(state.exchanges.length - 1, sharedSeed());
}

/** Lanes are asked with the same seed, so that they differ by their weights alone. */
const sharedSeed = () => ($("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value));

function answerExchange(index, seed) {
  state.exchanges.length = index + 1;
  state.exchanges[index].replies = state.lanes.map(newReply);
  show();
  state.lanes.forEach((_, lane) => answer(index, lane, seed));
}

const newReply = () => ({ text: "", block: tokenBlock("Answer, token by token"), finish: "", isDone: false });

async function answer(index, lane, seed) {
  const reply = state.exchanges[index].replies[lane];
  const controller = new AbortController();
  running.add(controller);
  busy();
  let held = []; // tokens whose text has not come yet: parts of a character, or of a stop text
  try {
    const [path, body] = requestOf(index, lane, seed);
    for await (const event of stream(`/oai/api/v1${path}`, body, controller.signal)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const text = choice.delta?.content ?? choice.text ?? "";
      held.push(...tokensOf(choice.logprobs));
      if (text) {
        reply.text += text;
        reply.block.append(tokenSpan(text, held));
        held = [];
      }
      if (choice.finish_reason) reply.finish = choice.finish_reason;
    }
  } catch (error) {
    reply.finish = error.name === "AbortError" ? "stopped" : "error";
    if (error.name !== "AbortError") reply.trouble = error.message;
  }
  if (held.length) reply.block.append(tokenSpan(held.map((t) => t.token).join(""), held, "special"));
  reply.isDone = true;
  running.delete(controller);
  busy();
  showFinish(reply);
}

function tokenSpan(text, tokens, more = "") {
  const logprob = tokens.reduce((sum, t) => sum + t.logprob, 0);
  return token(text, `${tokens.length ? classOf(logprob) : ""} ${more}`, tokens.length ? toldOf(logprob) : [], tokens[0]?.tops ?? []);
}

/** The tokens of a chunk, whichever endpoint it came from. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((t) => ({ token: t.token, logprob: t.logprob, tops: t.top_logprobs.map((o) => [o.token, o.logprob]) }));
  return logprobs.tokens.map((text, i) => ({ token: text, logprob: logprobs.token_logprobs[i], tops: Object.entries(logprobs.top_logprobs?.[i] ?? {}).sort((a, b) => b[1] - a[1]) }));
}

function requestOf(index, lane, seed) {
  const shared = {
    model: state.lanes[lane], max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
    top_p: Number($("top-p").value), ...(Number.isFinite(seed) && { seed }), ...($("stop").value && { stop: $("stop").value }), stream: true,
  };
  if (!state.isChat) return ["/completions", { ...shared, prompt: state.exchanges[index].user, logprobs: ALTERNATIVES }];
  const messages = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  state.exchanges.slice(0, index + 1).forEach((exchange, i) => {
    messages.push({ role: "user", content: exchange.user });
    if (i < index) messages.push({ role: "assistant", content: exchange.replies[lane].text });
  });
  return ["/chat/completions", { ...shared, messages, logprobs: true, top_logprobs: ALTERNATIVES }];
}

// --- showing

function busy() {
  $("stop-all").hidden = running.size === 0;
  $("send").disabled = running.size > 0;
  $("hint").textContent = running.size ? "Escape stops" : "";
}

function show() {
  hideCard();
  $("add-model").hidden = state.lanes.length >= MOST_LANES;
  fill($("lanes"), state.lanes.map((model, lane) => h("section", { class: "lane card", "aria-label": `Model ${lane + 1}` },
    laneHead(model, lane),
    state.exchanges.length ? state.exchanges.map((exchange, index) => exchangeOf(exchange, index, lane)) : h("p", { class: "muted hint" }, state.isChat ? "Say something below." : "The text goes on here."))));
}

function laneHead(model, lane) {
  const known = state.models.includes(model) ? state.models : [...state.models, model];
  const select = h("select", { "aria-label": `Model ${lane + 1}`, onchange: (event) => {
    state.lanes[lane] = event.target.value;
    keep();
  } }, known.map((name) => h("option", { value: name, selected: name === model }, labelOf(name))));
  const remove = h("button", { class: "small", "aria-label": `Remove model ${lane + 1}`, onclick: () => {
    stopAll();
    state.lanes.splice(lane, 1);
    for (const exchange of state.exchanges) exchange.replies.splice(lane, 1);
    keep();
  } }, "Remove");
  return h("div", { class: "lane-head" }, select, state.lanes.length > 1 ? remove : null);
}

/** A checkpoint by its own name, which comes first because little room is left for both, and its run's. */
function labelOf(model) {
  const [, run, name] = /^tinker:\/\/([^/]+)\/(?:sampler_)?weights\/(.+)$/.exec(model) ?? [];
  return run ? `${name} · ${state.nameOf(run)}` : model;
}

function exchangeOf(exchange, index, lane) {
  const reply = exchange.replies[lane];
  reply.end ??= h("p", { class: "reply-end small muted" });
  showFinish(reply);
  if (!state.isChat) return h("div", { class: "reply completion" }, h("span", { class: "given" }, exchange.user), reply.block, reply.end, again(index));
  return [
    h("div", { class: "said" }, h("p", {}, exchange.user), h("button", { class: "small", onclick: () => edit(index) }, "Edit")),
    h("div", { class: "reply" }, reply.block, reply.end, index === state.exchanges.length - 1 ? again(index) : null),
  ];
}

const again = (index) => h("button", { class: "small", onclick: () => !running.size && answerExchange(index, sharedSeed()) }, "Regenerate");

const ENDS = { length: "Ended: most tokens reached", stopped: "Stopped by you", stop: "" };

function showFinish(reply) {
  if (!reply.end) return;
  reply.end.classList.toggle("error", Boolean(reply.trouble));
  reply.end.textContent = reply.trouble ?? ENDS[reply.finish] ?? "";
}

function edit(index) {
  stopAll();
  $("prompt").value = state.exchanges[index].user;
  state.exchanges.length = index;
  show();
  $("prompt").focus();
}

function showCode() {
  if (!state.exchanges.length) return notify(state.isChat ? "Send a message first; the code repeats it." : "Complete a text first; the code repeats it.");
  const [path, body] = requestOf(state.exchanges.length - 1, 0, $("seed").value === "" ? undefined : Number($("seed").value));
  const plain = { ...body };
  delete plain.stream;
  const both = [["curl", curl(path, plain)], ["Python", python(path, plain)]];
  dialog("The last request as code",
    both.map(([name, text]) => [h("div", { class: "code-head" }, h("h3", {}, name), copyButton(text)), h("pre", { tabindex: "0" }, text)]),
    h("p", { class: "muted small" }, "The key is read from ", code("TINKER_API_KEY"), "."), closing()).classList.add("code");
}
