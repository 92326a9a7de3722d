import { get, path } from "../api.js";
import { $, code, empty, fill, h, runLink, terms } from "../dom.js";
import { clock, duration, number, runName } from "../format.js";
import { listen, soon } from "../live.js";
import { titleOf } from "../metrics.js";
import { page } from "../shell.js";
import { statusPill } from "../operation_status.js";
import { classOf, percent, token, tokenBlock, toldOf } from "../tokens.js";

const [, , id, , step] = location.pathname.split("/").map(decodeURIComponent);
const at_step = Number(step);
const here = (...parts) => path("training_runs", id, ...parts);
const MOST_POINTS = 5000;

page(async () => {
  await load();
  const again = soon(load, 200);
  listen({ operation: ({ seq }) => seq === at_step && again(), reset: again }, id);
}, "examples");

async function load() {
  const [run, found, { operations }, metrics] = await Promise.all([
    get(here()), get(here("examples"), { step }), get(here("operations"), { before: at_step + 1, limit: 1 }),
    get(here("metrics"), { after: at_step - 1, points: MOST_POINTS })]);
  document.title = `Operation ${step} of ${runName(run)} · Tinsmith`;
  fill($("crumb"), runLink(id, runName(run)));
  $("title").textContent = `Operation ${step}`;
  const place = (to) => `/training_runs/${encodeURIComponent(id)}/steps/${to}`;
  fill($("actions"), at_step > 0 ? h("a", { class: "button", href: place(at_step - 1), rel: "prev" }, "Previous") : null, h("a", { class: "button", href: place(at_step + 1), rel: "next" }, "Next"));
  showFacts(operations[0], metrics.series);
  showExamples(found);
}

function showFacts(operation, series) {
  const isHere = operation?.seq === at_step;
  const facts = isHere ? [["Kind", code(operation.kind)], ["Status", statusPill(operation)], ...(operation.error ? [["Error", h("span", { class: "error" }, operation.error)]] : []), ["Ended", operation.ended ? clock(operation.ended) : "not yet"],
    ["Computed", operation.started && operation.ended ? duration(operation.ended - operation.started) : "–"], ["Tokens", number(operation.tokens)]] : [["Operation", "not in the log: still to come, or long ago"]];
  for (const [key, values] of Object.entries(series)) {
    const place = values.axis === "seq" ? values.x.indexOf(at_step) : -1;
    if (place >= 0) facts.push([titleOf(key), number(values.mean[place], 6)]);
  }
  fill($("facts"), terms(facts));
}

function showExamples({ examples, is_recorded }) {
  if (!examples.length && !is_recorded) return fill($("examples"), empty("Examples are not kept", "Data is private, so this is off unless whoever runs the server sets ", code("keep_examples"), "."));
  if (!examples.length) return fill($("examples"), empty("No examples of this operation", "A few are kept per operation, and the oldest go first when the room for them is full."));
  const isTrained = (example) => example.source === "trained";
  fill($("examples"), examples.filter(isTrained).map(exampleOf), examples.filter((example) => !isTrained(example)).map(answerOf));
}

/** An answer below its prompt, which is shown once for those that share it. */
function answerOf(example, index, all) {
  const isNew = String(example.prompt_ids) !== String(all[index - 1]?.prompt_ids);
  const block = tokenBlock(`Answer ${index + 1}, token by token`);
  block.append(...example.tokens.map((text, i) => token(text, classOf(example.logprobs?.[i]), example.logprobs ? toldOf(example.logprobs[i]) : [])));
  const ended = example.stop_reason === "stop" ? "ended by itself" : "ended at its limit";
  return h("article", { class: "card" }, isNew ? [h("h3", {}, "Prompt"), h("p", { class: "prompt tokens muted" }, example.prompt.join(""))] : null,
    h("h3", {}, `Answer ${index + 1}`, h("small", { class: "muted" }, ` ${number(example.length)} tokens${cutOf(example)}, ${ended}`)), block);
}

const cutOf = (example) => (example.length > example.tokens.length ? `, the first ${number(example.tokens.length)} shown` : "");

function exampleOf(example, index) {
  const block = tokenBlock(`Example ${index + 1}, token by token`);
  block.append(...example.tokens.map((text, i) => {
    const weight = example.weights?.[i];
    const told = [];
    if (weight !== undefined) told.push(["Weight", number(weight)]);
    if (example.advantages) told.push(["Advantage", number(example.advantages[i])]);
    if (example.logprobs) told.push(...toldOf(example.logprobs[i]));
    if (example.sampled_logprobs) told.push(["When sampled", percent(example.sampled_logprobs[i])]);
    const isContext = weight === 0 || example.advantages?.[i] === 0;
    return token(text, isContext ? "context" : classOf(example.logprobs?.[i]), told);
  }));
  return h("article", { class: "card" }, h("h3", {}, `Example ${index + 1}`, h("small", { class: "muted" }, ` ${number(example.length)} tokens${cutOf(example)}`)), block);
}
