// Small charts of the last minutes. A chart is a path in an SVG, coloured by the stylesheet.
import { byId, el, milliseconds, number, percent } from "./dom.js";
import { state } from "./state.js";

const POINTS = 180;
const FEWEST = 60; // a chart that has just begun is not stretched further than this
const HEIGHT = 38;
const SVG = "http://www.w3.org/2000/svg";

const CHARTS = [
  { id: "occupancy", title: "Occupancy", low: (g) => g.occupancy, top: 1, show: (v) => [percent(v), "% of blocks"] },
  { id: "waste", title: "Waste", low: (g) => g.waste_percent / 100, least: 0.2, show: (v) => [percent(v), "% of slots in use"] },
  { id: "hits", title: "Prefix hits", hint: "Of the last minute's new prompts, counted from when this page was opened", none: "no new prompts yet", low: (g) => g.hit_rate, top: 1, keep: true, show: (v) => [percent(v), "% of prompt tokens"] },
  { id: "rate", title: "Output", low: (g) => g.tokens_per_s, least: 10, show: (v) => [v < 10 ? v.toFixed(1) : number(Math.round(v)), "tokens/s"] },
  { id: "first", title: "First token", low: (g) => g.first_token_p50_s, high: (g) => g.first_token_p99_s, least: 0.01, keep: true, show: (v) => [milliseconds(v), "p50"] },
  { id: "inter", title: "Inter-token", low: (g) => g.inter_token_p50_s, high: (g) => g.inter_token_p99_s, least: 0.01, keep: true, show: (v) => [milliseconds(v), "p50"] },
];

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.lows = [];
    this.highs = [];
    this.value = el("p", { className: "value", id: `chart-${spec.id}` }, "–");
    this.high = el("span", { className: "high" });
    const svg = document.createElementNS(SVG, "svg");
    this.svg = svg;
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.paths = {};
    for (const name of ["area", "low", "top"]) {
      this.paths[name] = document.createElementNS(SVG, "path");
      this.paths[name].setAttribute("class", name);
      svg.append(this.paths[name]);
    }
    byId("charts").append(el("article", { className: "card chart", title: spec.hint ?? "" }, el("h2", {}, spec.title, this.high), this.value, svg));
  }

  add(gauges) {
    const { spec } = this;
    let low = spec.low(gauges);
    let high = spec.high?.(gauges) ?? null;
    // A rate of hits, or a latency, is what it last was until something new is measured.
    if (low === null && spec.keep && this.lows.length) [low, high] = [this.lows.at(-1), this.highs.at(-1)];
    this.lows.push(low);
    this.highs.push(high);
    if (this.lows.length > POINTS) { this.lows.shift(); this.highs.shift(); }
  }

  draw() {
    const { spec } = this;
    const low = this.lows.at(-1) ?? null;
    const high = this.highs.at(-1) ?? null;
    if (low === null) {
      this.value.replaceChildren("–", ...(spec.none ? [el("small", {}, spec.none)] : []));
    } else {
      const [text, unit] = spec.show(low);
      this.value.replaceChildren(text, el("small", {}, unit));
    }
    this.high.textContent = high === null ? "" : `${milliseconds(high)} p99`;
    this.span = Math.max(FEWEST, this.lows.length);
    this.svg.setAttribute("viewBox", `0 0 ${this.span - 1} ${HEIGHT}`);
    const known = [...this.lows, ...this.highs].filter((v) => v !== null);
    const top = spec.top ?? Math.max(spec.least, ...known) * 1.08;
    const line = this.path(this.lows, top);
    this.paths.low.setAttribute("d", line);
    this.paths.area.setAttribute("d", line && `${line}L${this.span - 1},${HEIGHT}L${this.firstX(this.lows)},${HEIGHT}Z`);
    this.paths.top.setAttribute("d", this.path(this.highs, top));
  }

  firstX(values) {
    return this.span - values.length + values.findIndex((v) => v !== null);
  }

  path(values, top) {
    let text = "";
    values.forEach((value, i) => {
      if (value === null) return;
      const x = this.span - values.length + i;
      const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, value / top);
      text += `${text ? "L" : "M"}${x},${y.toFixed(1)}`;
    });
    return text;
  }
}

export function startCharts() {
  const charts = CHARTS.map((spec) => new Chart(spec));
  state.addEventListener("chart", ({ detail }) => {
    for (const gauges of detail) for (const chart of charts) chart.add(gauges);
    for (const chart of charts) chart.draw();
  });
}
