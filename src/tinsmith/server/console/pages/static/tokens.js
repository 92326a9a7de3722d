// Tokens as text, coloured by what the model thought of them, with a card for each.

import { h, terms } from "./dom.js";
import { number } from "./format.js";

const CLASSES = [[-0.105, "p4"], [-0.693, "p3"], [-1.609, "p2"], [-2.996, "p1"]];
const facts = new WeakMap();
let card = null;

/** The class for a log-probability; none where nothing is known. */
export const classOf = (logprob) => (Number.isFinite(logprob) ? (CLASSES.find(([least]) => logprob >= least)?.[1] ?? "p0") : "");

/** A block of tokens that is read with the mouse, or with the arrow keys once it has the focus. */
export function tokenBlock(label) {
  const block = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": label });
  block.addEventListener("mouseover", (event) => showCard(event.target));
  block.addEventListener("mouseleave", hideCard);
  block.addEventListener("blur", hideCard);
  block.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hideCard();
    if (!step) return;
    event.preventDefault();
    const all = [...block.querySelectorAll(".token")];
    const next = all[Math.max(0, Math.min(all.length - 1, all.findIndex((t) => t.classList.contains("at")) + step))];
    if (next) showCard(next);
  });
  return block;
}

/** One token: its text and `[[name, value], …]` to tell about it; `tops` are [text, logprob] pairs. */
export function token(text, kind, told, tops = []) {
  const span = h("span", { class: `token ${kind}` }, text);
  facts.set(span, { text, told, tops });
  return span;
}

function showCard(span) {
  const known = facts.get(span);
  if (!known) return;
  hideCard();
  span.classList.add("at");
  const chosen = known.tops.findIndex(([text]) => text === known.text);
  const rows = known.tops.map(([text, logprob], index) => [visible(text), percent(logprob), index === chosen]);
  card = h("div", { class: "token-card", role: "status" },
    h("p", {}, h("code", {}, visible(known.text))),
    h("dl", {}, terms(known.told)),
    rows.length ? h("ol", {}, rows.map(([text, share, isChosen]) => h("li", { class: isChosen ? "chosen" : null }, h("code", {}, text), h("span", {}, share)))) : null);
  document.body.append(card);
  const box = span.getBoundingClientRect();
  const left = Math.min(box.left, innerWidth - card.offsetWidth - 8);
  const isBelow = box.bottom + card.offsetHeight + 8 < innerHeight;
  card.style.left = `${Math.max(8, left)}px`;
  card.style.top = `${isBelow ? box.bottom + 4 : Math.max(8, box.top - card.offsetHeight - 4)}px`;
}

export function hideCard() {
  card?.remove();
  card = null;
  document.querySelectorAll(".token.at").forEach((span) => span.classList.remove("at"));
}

/** What is known of a sampled token. */
export const toldOf = (logprob) => [["Probability", percent(logprob)], ["Log-probability", number(logprob)]];

export const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "<0.1 %";
};

const visible = (text) => (text === "" ? "(nothing)" : JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣"));
