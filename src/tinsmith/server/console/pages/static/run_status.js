// What a run is doing, in one word, from what the API tells about it.

import { pill } from "./dom.js";
import { moment } from "./format.js";

const ACTIVE_SECONDS = 60;

export function statusOf(run, queue) {
  if (run.corrupted) return ["bad", "Failed"];
  if (queue?.waiting && queue.place) return ["warn", `Waiting, place ${queue.place}`];
  const isActive = queue?.waiting || Date.now() / 1000 - moment(run.last_request_time) < ACTIVE_SECONDS;
  return isActive ? ["good", "Training"] : ["", "Idle"];
}

export const statusPill = (run, queue) => pill(...statusOf(run, queue));
