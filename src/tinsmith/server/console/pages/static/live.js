// The tab's one stream of events. It resumes where it was, and ends when the session does. A tab that
// nobody sees has none: a browser keeps six connections to a server, and all tabs share them.

import { get, toLogin } from "./api.js";
import { $ } from "./dom.js";

const RETRY_MS = 2000;

/**
 * Listen to events by their name: `{step: (data) => …}`. `run` is the run to hear of, or all.
 * `reset` is called when events were missed: what is shown has to be asked for anew.
 */
export function listen(handlers, run) {
  let source;
  const say = (kind, text) => {
    $("live").hidden = false;
    if ($("live").textContent === text) return;
    $("live").className = `live ${kind}`;
    $("live").textContent = text;
  };
  const open = () => {
    source = new EventSource(`/api/v1/console/events${run ? `?run=${encodeURIComponent(run)}` : ""}`);
    source.addEventListener("open", () => say("on", "Live"));
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(event.data && JSON.parse(event.data)));
    }
    source.addEventListener("goodbye", () => toLogin("ended"));
    source.addEventListener("error", async () => {
      say("off", "Reconnecting");
      await get("/api/v1/auth/apikey/me").catch(() => null); // leads to the login page if the key is gone
      // A browser goes on by itself after a lost connection, with what it missed; not after a refusal.
      if (source.readyState === EventSource.CLOSED) setTimeout(again, RETRY_MS);
    });
  };
  const again = () => {
    source?.close();
    open();
    handlers.reset?.();
  };
  if (!document.hidden) open();
  document.addEventListener("visibilitychange", () => (document.hidden ? source?.close() : again()));
  addEventListener("pagehide", () => source?.close());
}

/** The function, at most once in so many milliseconds, and always once after the last call. */
export function soon(work, ms) {
  let timer = null;
  return () => (timer ??= setTimeout(() => {
    timer = null;
    work();
  }, ms));
}

/** Do `load` after any of these events, and when the stream begins: most are told only to who is there. */
export function reload(load, names, run) {
  const again = soon(load, 300);
  listen(Object.fromEntries([...names, "open", "reset"].map((name) => [name, again])), run);
}
