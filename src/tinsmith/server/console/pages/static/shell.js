// What every page has: theme, who is signed in, keyboard, and the way an error is shown.

import { get, send } from "./api.js";
import { $, closing, dialog, empty, fill, h, link, on, terms } from "./dom.js";
import { ago } from "./format.js";

const THEMES = ["system", "light", "dark"];
const GO = { r: "/", s: "/sessions", c: "/checkpoints", o: "/compare", p: "/playground", u: "/usage", v: "/server", k: "/keys" };

/** Run a page: its errors are said where its content would be; all of it is gone if its subject is. */
export async function page(main, where) {
  const here = document.querySelector(".rail [aria-current]");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.clientWidth / 2; // on a narrow screen
  theme();
  keyboard();
  setInterval(() => document.querySelectorAll("time").forEach((e) => (e.textContent = ago(Number(e.dataset.at)))), 5000);
  who();
  try {
    await main();
  } catch (error) {
    trouble(error.status === 404 ? $("main") : $(where), error);
  }
}

/** An error in place of a part of the page, with a way to try again. */
export function trouble(element, error) {
  console.info(error); // not console.error: what is said on the page is not a fault of the page
  const title = error.status === 404 ? "Not found" : "This could not be loaded";
  const again = error.status === 404 ? link("/", "To your runs") : h("button", { onclick: () => location.reload() }, "Try again");
  const said = error.message[0].toUpperCase() + error.message.slice(1);
  const heading = element === $("main") ? h("h1", {}, title) : title;
  fill(element, h("div", { class: "empty bad" }, empty(heading, /[.?!]$/.test(said) ? said : `${said}.`), again));
}

function theme() {
  const button = $("theme");
  if (!button) return;
  const show = () => {
    const chosen = document.documentElement.dataset.theme ?? "system";
    $("theme-name").textContent = chosen[0].toUpperCase() + chosen.slice(1);
    button.setAttribute("aria-label", `Theme: ${chosen === "system" ? "as the system" : chosen}`);
  };
  button.addEventListener("click", () => {
    const chosen = document.documentElement.dataset.theme ?? "system";
    const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    localStorage.setItem("theme", next);
    show();
    dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
  show();
}

async function who() {
  if (!$("owner")) return;
  try {
    const key = await get("/api/v1/auth/apikey/me");
    $("owner").textContent = key.details.org_details.name;
    $("leave").hidden = key.key_id === 0; // without authentication there is nothing to leave
  } catch {
    // The page's own requests say what is wrong.
  }
  on("leave", "click", async () => {
    await send("POST", "/console/logout");
    location.replace("/login");
  });
}

function keyboard() {
  let went = 0; // when "g" was pressed: the next letter is a place
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
    if (event.key === "/" && document.querySelector("input[type=search]")) {
      event.preventDefault();
      document.querySelector("input[type=search]").focus();
    } else if (event.key === "g") went = Date.now();
    else if (GO[event.key] && Date.now() - went < 1500) location.assign(GO[event.key]);
    else if (event.key === "?") help();
  });
}

function help() {
  const keys = [["/", "search"], ...Object.entries(GO).map(([key, to]) => [`g ${key}`, to.slice(1) || "runs"]), ["?", "this list"]];
  dialog("Keyboard", h("dl", { class: "facts" }, terms(keys.map(([key, does]) => [h("kbd", {}, key), does]))), closing());
}
