// The metrics worth a look first, in order, and what to call them. Others have their own names.

import { $, typed } from "./dom.js";
import { measured } from "./format.js";

const CURATED = [
  ["loss", "Loss per token"],
  ["unclipped_grad_l2:mean", "Gradient norm"],
  ["optim/learning_rate", "Learning rate"],
  ["kl_q_p:mean", "KL to the sampler"],
  ["logprob_gap:mean", "Trainer–sampler gap"],
  ["clip_fraction:mean", "Clip fraction"],
  ["entropy:mean", "Entropy"],
  ["advantage:std", "Spread of advantages"],
  ["length:mean", "Tokens per sequence"],
  ["time/tokens_per_second", "Tokens per second"],
  ["time/wait", "Waiting"],
  ["time/compute", "Computing"],
];

const TITLES = new Map([...CURATED, ["advantage:mean", "Mean advantage"], ["advantage_zero_fraction", "Advantages of zero"], ["logprob_gap:max", "Largest gap"],
  ["length:max", "Longest sequence"], ["sequences", "Sequences"], ["loss:sum", "Loss, summed"]]);

/** How a chart shows a metric's values, where not as plain numbers. */
export const formatsOf = (key) => (/^time\/(wait|compute)$/.test(key) ? { format: measured, ticks: measured } : {});

export const titleOf = (key) => TITLES.get(key) ?? key;

/** Those of the overview: rewards, the loss, what else the client posted, and the other curated ones. */
function overview(keys, posted) {
  const [loss, ...rest] = CURATED.map(([key]) => key).filter((key) => keys.includes(key));
  const rewards = posted.filter((key) => /reward/i.test(key));
  return [...new Set([...rewards, loss, ...posted, ...rest])].filter(Boolean);
}

/** The metrics whose names have what is typed in the filter; of all if that is wanted, otherwise of the overview. */
export function filtered(keys, isPosted) {
  const wanted = typed("filter");
  const some = $("all").checked || wanted ? keys : overview(keys, keys.filter(isPosted));
  return some.filter((key) => `${key} ${titleOf(key)}`.toLowerCase().includes(wanted));
}

/** What an ended pass says about time; the server keeps it with the operation. */
export function timesOf(operation) {
  if (operation.status !== "done" || !operation.started || !operation.tokens) return {};
  const compute = operation.ended - operation.started;
  const times = { "time/wait": operation.started - operation.submitted, "time/compute": compute };
  if (compute > 0) times["time/tokens_per_second"] = operation.tokens / compute;
  return times;
}

export const emptySeries = (axis = "seq") => ({ axis, x: [], t: [], mean: [], min: [], max: [] });

/** Put a point into a series at its place; one that is told again, or posted anew, takes the place of the first. Whether there are later ones. */
export function put(series, x, t, value) {
  let at = series.x.length;
  while (at > 0 && series.x[at - 1] >= x) at -= 1;
  const replaced = series.x[at] === x ? 1 : 0;
  const point = { x, t, mean: value, min: value, max: value };
  for (const [name, each] of Object.entries(point)) series[name].splice(at, replaced, each);
  return at < series.x.length - 1;
}
