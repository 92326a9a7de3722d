// What an operation is doing, in one word.

import { h, pill } from "./dom.js";

export function statusPill({ status, started }) {
  if (status === "failed") return pill("bad", "Failed");
  if (status === "pending") return started ? pill("good", "Running") : pill("warn", "Waiting");
  return h("span", { class: "muted" }, "Done");
}
