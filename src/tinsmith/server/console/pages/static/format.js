// Numbers, sizes and times as people read them.

const MISSING = "–";

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e6) return Math.round(value).toLocaleString("en").replace("-", "−");
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e").replaceAll("-", "−");
  return value.toPrecision(digits).replace("-", "−");
}

/** A number beside an axis: as short as it can be said. */
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return count(value).replace(".0 ", " ");
  const short = size !== 0 && size < 1e-3 ? value.toExponential() : String(Number(value.toPrecision(6)));
  return short.replaceAll("-", "−");
}

const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function count(value) {
  if (value === null || value === undefined) return MISSING;
  for (const [size, name] of SCALES) if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 1)} ${name}`;
  return String(Math.round(value));
}

export function bytes(value) {
  if (value === null || value === undefined) return MISSING;
  for (const [size, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (value >= size) return `${(value / size).toFixed(1)} ${name}`;
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return MISSING;
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

/** A measured time: with digits where `duration` has none. */
export const measured = (seconds) => (seconds > 0 && seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : seconds === 0 ? "0" : duration(seconds));

/** Seconds since 1970 of what the API gives: a number, or an RFC 3339 text. */
export const moment = (value) => (typeof value === "number" ? value : Date.parse(value) / 1000);

export function ago(value) {
  if (value === null || value === undefined) return MISSING;
  const seconds = Date.now() / 1000 - moment(value);
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.round(seconds)} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} d ago`;
}

export function until(value) {
  const seconds = moment(value) - Date.now() / 1000;
  if (seconds <= 0) return "expired";
  return seconds < 5400 ? `in ${Math.ceil(seconds / 60)} min` : seconds < 129600 ? `in ${Math.round(seconds / 3600)} h` : `in ${Math.round(seconds / 86400)} d`;
}

export const clock = (value) =>
  new Date(moment(value) * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** The end of a long id: the beginning is mostly the same. */
export const shortId = (id) => (id.length > 22 ? `${id.slice(0, 8)}…${id.slice(-10)}` : id);

/** What the user called it, or else its base model and the beginning of its id. */
export const runName = (run) =>
  run.user_metadata?.name || run.user_metadata?.run_name || `${run.base_model.split("/").at(-1)} ${run.training_run_id.slice(0, 8)}`;
