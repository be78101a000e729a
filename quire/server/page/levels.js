// The device and the levels below it: what each holds, what was found there, and what has moved.
import { byId, el, number, percent, plural } from "./dom.js";
import { state } from "./state.js";

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = count ? Math.min(units.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  const value = count / 2 ** (10 * unit);
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
};

const age = (seconds) => {
  if (seconds >= 172800) return plural(Math.floor(seconds / 86400), "day");
  if (seconds >= 7200) return `${Math.floor(seconds / 3600)} h`;
  if (seconds >= 120) return `${Math.floor(seconds / 60)} min`;
  return `${Math.round(seconds)} s`;
};

function row(level) {
  const { block_size: size, block_bytes: blockBytes } = state.info;
  const isDevice = level.level === "device";
  const share = level.max_blocks ? level.num_blocks / level.max_blocks : level.max_bytes ? level.num_bytes / level.max_bytes : null;
  const meter = share === null ? null : el("span", { className: "meter", "--share": `${100 * Math.min(1, share)}%`, title: `${percent(share)} % full` });
  const moved = isDevice ? null : ((level.num_loaded ?? 0) + (level.num_stored ?? 0)) * blockBytes;
  const bad = (level.num_rejected ?? 0) + (level.num_missing ?? 0);
  const found = isDevice ? level.num_hit_tokens : level.num_loaded * size;
  const cells = [
    el("td", {}, level.level),
    el("td", { className: "num" }, number(level.num_blocks), meter),
    el("td", { className: "num" }, number(found)),
    el("td", { className: "num" }, isDevice ? "–" : number(level.num_stored)),
    el("td", { className: "num" }, moved === null ? "–" : bytes(moved)),
    el("td", { className: "num" }, level.oldest_s ? age(level.oldest_s) : "–"),
    el("td", { className: "num" }, isDevice ? "–" : number(bad)),
  ];
  // Where the screen is too narrow for a heading, each number says what it is.
  const names = ["", "blocks", "tokens found", "written", "moved", "old", "missing or bad"];
  cells.forEach((cell, i) => { if (names[i] && cell.textContent !== "–") cell.dataset.name = names[i]; });
  return el("tr", {}, ...cells);
}

export function startLevels() {
  state.addEventListener("levels", ({ detail }) => {
    byId("levels").hidden = detail.levels.length < 2;
    byId("level-rows").replaceChildren(...detail.levels.map(row));
    const loading = detail.num_loading ? `, ${plural(detail.num_loading, "request")} waiting for blocks` : "";
    const share = detail.num_queries ? `${percent(detail.num_hits / detail.num_queries)} % of what the device did not have came from below` : "";
    byId("levels-summary").textContent = share + loading;
  });
}
