// Building the page. Text becomes text nodes, never markup: names and samples are hostile.

import { ago, clock, moment, runName, shortId } from "./format.js";

export const $ = (id) => document.getElementById(id);
export const typed = (id) => $(id).value.trim().toLowerCase();
export const on = (id, event, does) => $(id).addEventListener(event, does);

/** An element. Props: `class`, `data`, `on…` listeners, and attributes; false and null are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...real(children));
  return element;
}

/** A part of a drawing, or a whole one. */
export function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Parts of an axis from 0 to 1000: [class, from, to]. */
export const bar = (parts) => svg("svg", { class: "bar", viewBox: "0 0 1000 8", preserveAspectRatio: "none", "aria-hidden": "true" },
  ...[["back", 0, 1000], ...parts].map(([kind, x, to]) => svg("rect", { class: kind, x, width: Math.max(to - x, 0), height: 8 })));

const real = (children) => children.flat(Infinity).filter((child) => (child ?? false) !== false);

export function fill(element, ...children) {
  element.replaceChildren(...real(children));
  element.removeAttribute("aria-busy");
  return element;
}

export const link = (href, ...children) => h("a", { href }, ...children);
export const runLink = (run, name, below = "") => link(`/training_runs/${encodeURIComponent(run)}${below}`, name);
export const stepLink = (run, seq, name) => runLink(run, name, `/steps/${seq}`);
export const checkpointLink = (run, name) => link(`/checkpoints/${encodeURIComponent(run)}/${encodeURIComponent(name)}`, name);

/** How long ago something was; `shell` keeps it true. */
export const since = (value) => (value ? h("time", { data: { at: moment(value) }, title: clock(value) }, ago(value)) : "–");

/** What stands below the first words of a cell. */
export const second = (text, tag = "span") => (text?.length ? h(tag, { class: "second" }, text) : null);

/** A run by its name and the beginning of its id. */
export const runCell = (run) => [runLink(run.training_run_id, runName(run)), h("code", { class: "second", title: run.training_run_id }, shortId(run.training_run_id))];

/** What a list of terms holds: [term, value]. */
export const terms = (pairs) => pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);

/** Numbers at a glance: [name, value, what is said beside it]. */
export const strip = (cells) => cells.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, " ", more ? h("small", {}, more) : null)));

/** A table in a frame that can be scrolled by keyboard; on a phone a row is a card, where cells carry their headings. Columns: [heading, cell function, class]. */
export function table(label, columns, rows) {
  return h("div", { class: "scroll rows", tabindex: "0", role: "region", "aria-label": label },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map(([name, cell, kind]) => h("td", { class: kind, data: typeof name === "string" ? { label: name } : null }, cell(row))))))));
}

/** What a part of a page says when it has nothing to show, and what to do about it. */
export const empty = (title, ...advice) => h("div", { class: "empty" }, typeof title === "string" ? h("p", { class: "title" }, title) : title, h("p", {}, ...advice));

export const code = (text) => h("code", {}, text);

export function pill(kind, text) {
  return h("span", { class: `pill ${kind}` }, text);
}

/** A line at the edge of the window that goes away by itself. */
export function notify(text, kind = "good") {
  const line = h("p", { class: `notice ${kind}` }, text);
  $("notices").append(line);
  setTimeout(() => line.remove(), kind === "bad" ? 9000 : 4000);
}

export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "small", "aria-label": `${label} ${text.slice(0, 80)}` }, label);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

/** A dialog that any of its buttons closes. */
export function dialog(title, ...children) {
  const element = h("dialog", { "aria-labelledby": "dialog-title" }, h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), children));
  element.addEventListener("close", () => element.remove());
  document.body.append(element);
  element.showModal();
  return element;
}

export const closing = () => h("div", { class: "actions" }, h("button", {}, "Close"));

/** Ask before something that cannot be undone. Resolves to whether to go on. */
export function confirm(title, body, action) {
  const asked = dialog(title, body, h("div", { class: "actions" },
    h("button", { value: "no" }, "Cancel"), h("button", { value: "yes", class: "danger" }, action)));
  return new Promise((resolve) => asked.addEventListener("close", () => resolve(asked.returnValue === "yes")));
}
