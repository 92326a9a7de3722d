// A chart: uPlot drawn in the page's colours, the value under the cursor, and its numbers as a table.

import { h, svg, table } from "./dom.js";
import { clock, duration, number, tick } from "./format.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4]];
const WHOLE = Array.from({ length: 10 }, (_, i) => [1, 2, 5].map((n) => n * 10 ** i)).flat(); // between numbers of operations
const HEIGHT = { wide: 320, plain: 190 };

/**
 * One figure. `update(lines)` shows lines of the API's shape: [{label, x, t, mean, min, max}], all
 * against their own x. `marks` are [{x, t, label}] on the axis; `onpick(x)` hears clicks on a point.
 */
export class Chart {
  constructor(title, { sync = "console", onpick, format = number, ticks = tick } = {}) {
    this.title = title;
    this.format = format; // a value, as text
    this.ticks = ticks; // the same beside the axis
    this.isWide = false;
    this.sync = sync;
    this.onpick = onpick;
    this.axis = "x";
    this.smoothing = 0;
    this.isLog = false;
    this.isElapsed = false; // t is in seconds since the line began, not a time of day
    this.lines = [];
    this.marks = [];
    this.value = h("output", { "aria-live": "off" });
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot", role: "img" });
    this.numbers = h("div", { hidden: true });
    this.log = h("button", { class: "plain", "aria-pressed": "false", onclick: () => this.toggleLog() }, "Log");
    this.tableButton = h("button", { class: "plain", "aria-expanded": "false", onclick: () => this.toggleTable() }, "Table");
    this.element = h("figure", { class: "chart", data: { key: title } },
      h("figcaption", {}, h("h3", {}, title), this.value, h("span", { class: "controls" }, this.log, this.tableButton)), this.plot, this.legend, this.numbers);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.plot);
    addEventListener("themechange", () => this.draw());
  }

  set(options) {
    Object.assign(this, options);
    this.draw();
  }

  /** The first chart of a page has the whole width. */
  widen(isWide) {
    this.isWide = isWide;
    this.element.classList.toggle("wide", isWide);
    this.fit();
  }

  update(lines, marks = this.marks) {
    const isSame = this.u && lines.length === this.lines.length && !this.smoothing === !this.drawnSmooth;
    this.lines = lines;
    this.marks = marks;
    if (isSame) {
      this.u.setData(this.data());
      this.describe();
    } else this.draw();
  }

  draw() {
    this.u?.destroy();
    this.u = null;
    this.plot.replaceChildren();
    if (!this.lines.some((line) => line.x.length) || !this.plot.clientWidth) return this.describe();
    this.colours = colours();
    this.drawnSmooth = this.smoothing > 0;
    this.u = new uPlot(this.options(), this.data(), this.plot);
    this.describe();
  }

  fit() {
    if (!this.u) this.draw();
    else if (this.u.width !== this.plot.clientWidth || this.u.height !== this.height) this.u.setSize({ width: this.plot.clientWidth, height: this.height });
  }

  get height() {
    return this.isWide ? HEIGHT.wide : HEIGHT.plain;
  }

  /** uPlot's columns: x, then for each line its least and greatest, its mean, and it smoothed. */
  data() {
    const columns = this.lines.flatMap((line) => {
      const x = line[this.axis];
      const mean = [x, line.mean];
      if (this.lines.length > 1) return this.smoothing ? [mean, [x, smooth(line.mean, this.smoothing)]] : [mean];
      const band = [[x, line.min], [x, line.max]];
      return this.smoothing ? [...band, mean, [x, smooth(line.mean, this.smoothing)]] : [...band, mean];
    });
    return join(columns);
  }

  options() {
    const { ink, muted, line, series } = this.colours;
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: muted, font, grid: { stroke: line, width: 1 }, ticks: { show: false } };
    return {
      width: this.plot.clientWidth, height: this.height, padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: `${this.sync}-${this.axis === "t" ? "t" : this.lines[0].axis}`, scales: ["x", null] }, y: false, drag: { x: true, y: false },
        bind: this.onpick ? { click: (u) => () => this.pick(u) } : {} },
      scales: { x: { time: this.axis === "t" && !this.isElapsed }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [{ ...axis, size: 26, gap: 4, grid: { show: false }, ...(this.axis === "x" ? { incrs: WHOLE } : this.isElapsed && { values: (u, splits) => splits.map(duration) }) },
        { ...axis, size: 56, gap: 4, values: (u, splits) => splits.map((v) => (v === null ? "" : this.ticks(v))) }],
      series: [{}, ...this.series(series, ink)],
      bands: this.lines.length === 1 ? [{ series: [2, 1], fill: faded(series[0], 0.18) }] : [],
      hooks: { draw: [(u) => this.drawMarks(u)], setCursor: [(u) => this.show(u.cursor.idx)] },
    };
  }

  series(palette) {
    const points = { show: (u, i) => this.lines.some((l) => l.x.length === 1), size: 6 };
    return this.lines.flatMap((_, index) => {
      const stroke = palette[index % palette.length];
      const dash = DASHES[index % DASHES.length];
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      const strong = { stroke, dash, width: 2, points, spanGaps: true };
      const weak = { stroke: faded(stroke, 0.3), width: 1, points: { show: false }, spanGaps: true };
      const own = this.smoothing ? [weak, strong] : [strong];
      return this.lines.length > 1 ? own : [hidden, hidden, ...own];
    });
  }

  drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = this.colours.series[1];
    ctx.lineWidth = devicePixelRatio;
    for (const mark of this.marks) {
      const at = mark[this.axis];
      if (at === null || at === undefined) continue;
      const x = u.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const bottom = bbox.top + bbox.height;
      const size = 5 * devicePixelRatio;
      ctx.globalAlpha = 0.4;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(x - size, bottom);
      ctx.lineTo(x, bottom - 1.6 * size);
      ctx.lineTo(x + size, bottom);
      ctx.fill();
    }
    ctx.restore();
  }

  pick(u) {
    const index = u.cursor.idx;
    const line = this.lines[0];
    if (index !== null && index !== undefined && line && u.select.width === 0) this.onpick(line.x[index]);
  }

  /** What the cursor is at, or the newest value. */
  show(index) {
    if (this.lines.length !== 1) return;
    const line = this.lines[0];
    const isAt = index !== null && index !== undefined && index < line.x.length;
    const at = isAt ? index : line.x.length - 1;
    if (at < 0) return;
    const where = isAt ? (this.axis === "t" ? this.when(line.t[at]) : `at ${line.x[at]}`) : "";
    this.value.replaceChildren(this.format(line.mean[at]), " ", h("small", {}, where));
  }

  when(t) {
    return this.isElapsed ? duration(t) : clock(t);
  }

  describe() {
    const said = this.lines.filter((line) => line.x.length).map((line) => {
      const end = line.x.length - 1;
      const name = this.lines.length > 1 ? `${line.label}: ` : "";
      return `${name}${this.format(line.mean[0])} at ${line.x[0]} to ${this.format(line.mean[end])} at ${line.x[end]}`;
    });
    this.plot.setAttribute("aria-label", `${this.title}: ${said.join("; ") || "no values yet"}`);
    this.plot.dataset.points = this.lines.reduce((sum, line) => sum + line.x.length, 0);
    if (!said.length && !this.u) this.plot.replaceChildren(h("p", { class: "muted small" }, "No values yet."));
    this.show(this.u?.cursor.idx);
    const isNamed = this.lines.length > 1 && this.isWide; // the narrow ones beside it have the same colours
    this.legend.replaceChildren(...(isNamed ? this.lines.map((line, index) => h("span", {}, lineSample(index), line.label)) : []));
    if (!this.numbers.hidden) this.fillTable();
  }

  toggleLog() {
    this.isLog = !this.isLog;
    this.log.setAttribute("aria-pressed", String(this.isLog));
    this.draw();
  }

  toggleTable() {
    this.numbers.hidden = !this.numbers.hidden;
    this.tableButton.setAttribute("aria-expanded", String(!this.numbers.hidden));
    if (!this.numbers.hidden) this.fillTable();
  }

  fillTable() {
    const rows = this.lines.flatMap((line) => line.x.map((x, i) => ({ line, i })).reverse());
    const columns = [
      ...(this.lines.length > 1 ? [["Run", ({ line }) => line.label]] : []),
      ["Operation", ({ line, i }) => number(line.x[i]), "number"], ["Time", ({ line, i }) => this.when(line.t[i]), "nowrap"],
      ["Mean", ({ line, i }) => number(line.mean[i], 6), "number"], ["Least", ({ line, i }) => number(line.min[i], 6), "number"],
      ["Greatest", ({ line, i }) => number(line.max[i], 6), "number"],
    ];
    this.numbers.replaceChildren(table(`${this.title} as numbers`, columns, rows));
  }
}

/** A small line of a run's loss for a table. */
export function sparkline(values, label) {
  const known = values.filter((v) => Number.isFinite(v));
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const points = known.map((v, i) => `${(i / Math.max(known.length - 1, 1)) * 98 + 1},${28 - ((v - low) / span) * 26}`);
  return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": label },
    svg("path", { d: points.length > 1 ? `M${points.join("L")}` : "" }));
}

/** A sample of a chart's line, as it is drawn. */
export const lineSample = (index) => svg("svg", { class: "line-sample", viewBox: "0 0 22 8", "aria-hidden": "true" },
  svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, class: `stroke-${(index % 6) + 1}`, "stroke-dasharray": DASHES[index % 6].join(" ") }));

/** Exponential moving average that does not lean to zero at the beginning. */
function smooth(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

/** Columns with their own x to one table with a common x. */
function join(columns) {
  const x = [...new Set(columns.flatMap(([own]) => own))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  const rows = columns.map(([own, values]) => {
    const column = new Array(x.length).fill(null);
    own.forEach((at, index) => (column[place.get(at)] = values[index]));
    return column;
  });
  return [x, ...rows];
}

function colours() {
  const probe = h("span", { hidden: true });
  document.body.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const found = { ink: read("ink"), muted: read("muted"), line: read("line"), series: [1, 2, 3, 4, 5, 6].map((n) => read(`series-${n}`)) };
  probe.remove();
  return found;
}

const faded = (colour, alpha) => colour.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);
