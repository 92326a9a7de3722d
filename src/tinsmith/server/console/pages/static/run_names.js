// What runs are called, for pages that know them by their ids.

import { get } from "./api.js";
import { runName, shortId } from "./format.js";

const MOST = 200;

/** From a run's id to its name; those before the last 200 keep their ids. */
export async function runNames() {
  const { training_runs } = await get("/api/v1/training_runs", { limit: MOST });
  const names = new Map(training_runs.map((run) => [run.training_run_id, runName(run)]));
  return (id) => names.get(id) ?? shortId(id);
}
