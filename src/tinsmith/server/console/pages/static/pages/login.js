import { $, on } from "../dom.js";

const REASONS = {
  ended: "Your session is over: it expired, or its key was revoked. Sign in with a key that is good.",
  link: "That link was used already or has expired. Paste an API key, or start the server again for a new link.",
};

const query = new URLSearchParams(location.search);
if (REASONS[query.get("reason")]) $("reason").textContent = REASONS[query.get("reason")];

on("login", "submit", async (event) => {
  event.preventDefault();
  $("trouble").textContent = "";
  let answer;
  try {
    answer = await fetch("/console/login", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ key: $("key").value.trim() }),
    });
  } catch {
    $("trouble").textContent = "The server cannot be reached; is it running?";
    return;
  }
  if (answer.ok) location.replace(next());
  else if (answer.status === 401) $("trouble").textContent = "This server does not know that key, or it was revoked.";
  else $("trouble").textContent = (await answer.json().catch(() => ({}))).detail ?? `The server answered ${answer.status}.`;
});

/** Where the user was; only ever a page of this server. Its path alone might begin like another site's address. */
function next() {
  const url = new URL(query.get("next") ?? "/", location.origin);
  return url.origin === location.origin ? url.href : "/";
}
