// Building the page. Text becomes text nodes, never markup: names and samples are hostile.

export const $ = (id) => document.getElementById(id);

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
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  element.removeAttribute("aria-busy");
  return element;
}

export const link = (href, ...children) => h("a", { href }, ...children);
export const runLink = (run, name) => link(`/training_runs/${encodeURIComponent(run)}`, name);
export const stepLink = (run, seq, name) => link(`/training_runs/${encodeURIComponent(run)}/steps/${seq}`, name);

/** What a list of terms holds: [term, value]. */
export const terms = (pairs) => pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);

/** Numbers at a glance: [name, value, what is said beside it]. */
export const strip = (cells) => cells.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, " ", more ? h("small", {}, more) : null)));

/** A table in a frame that can be scrolled by keyboard. Columns: [heading, cell function, class]. */
export function table(label, columns, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", {},
      h("thead", {}, h("tr", {}, columns.map(([name, , kind]) => h("th", { scope: "col", class: kind }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row))))))));
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

/** Ask before something that cannot be undone. Resolves to whether to go on. */
export function confirm(title, body, action) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-labelledby": "confirm-title" },
      h("form", { method: "dialog" },
        h("h2", { id: "confirm-title" }, title), body,
        h("div", { class: "actions" },
          h("button", { value: "no" }, "Cancel"),
          h("button", { value: "yes", class: "danger" }, action))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
