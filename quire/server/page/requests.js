// The table of requests, and the block table of the selected one.
import { byId, el, number, plural } from "./dom.js";
import { state, colour, shortName, SHARED } from "./state.js";

const OUTCOMES = {
  hit: ["hit", "every block that could match did"],
  partial: ["partial", "the first blocks matched, a later one did not"],
  cold: ["miss, cold", "its first block has not been seen before, or not under this salt"],
  evicted: ["miss, evicted", "what it needed had been cached once, and was evicted"],
  too_short: ["too short", "no full block before its last token"],
  skipped: ["skipped", "it asked not to read the cache, or wants prompt logprobs"],
  disabled: ["off", "prefix caching is off"],
};
const MAX_CELLS = 400;
const MAX_LISTED = 200; // the feed brings no more rows

export class Requests {
  constructor(openBlock) {
    this.openBlock = openBlock;
    this.body = byId("request-rows");
    this.lines = new Map(); // by seq_id
    this.tableOf = null; // whose block table is shown
    state.addEventListener("rows", () => this.draw());
    state.addEventListener("selected", () => this.draw());
  }

  draw() {
    const rows = state.shownRows();
    const wanted = new Set(rows.map((row) => row.seq_id));
    for (const [seqId, line] of this.lines) {
      if (!wanted.has(seqId)) {
        line.row.remove();
        this.lines.delete(seqId);
      }
    }
    rows.forEach((row, i) => {
      const line = this.lines.get(row.seq_id) ?? this.newLine(row);
      this.fill(line, row);
      if (this.body.children[i] !== line.row) this.body.insertBefore(line.row, this.body.children[i] ?? null);
    });
    byId("no-requests").hidden = rows.length > 0;
    this.summarize();
    this.drawTable();
    this.drawHost();
  }

  newLine(row) {
    const cells = Object.fromEntries(
      ["state", "prompt", "output", "cached", "outcome", "blocks"].map((name) => [name, el("td")]),
    );
    for (const name of ["prompt", "output", "cached", "blocks"]) {
      cells[name].className = "num";
      cells[name].dataset.name = name; // shown where there is no room for a header
    }
    const swatch = el("i", { className: "swatch" });
    swatch.style.background = colour(row.seq_id);
    const select = () => state.select(state.selected === row.seq_id ? null : row.seq_id);
    const button = el("button", { type: "button", title: row.request_id }, swatch, el("span", {}, shortName(row)));
    const line = { cells, button, row: el("tr", { onclick: select }, el("td", {}, button), ...Object.values(cells)) };
    this.lines.set(row.seq_id, line);
    return line;
  }

  fill({ row: tr, cells, button }, row) {
    const put = (cell, text) => { if (cell.textContent !== text) cell.textContent = text; };
    const blocks = state.blocksOf(row.seq_id);
    const shared = row.state === "done" ? 0 : blocks.filter((block) => (state.codes[block] & 7) === SHARED).length;
    const isPrompt = row.state === "running" && row.num_computed_tokens < row.num_prompt_tokens;
    put(cells.state, isPrompt ? `prompt, ${number(row.num_computed_tokens)}` : row.state);
    put(cells.prompt, number(row.num_prompt_tokens));
    put(cells.output, number(row.num_output_tokens));
    put(cells.cached, number(row.num_cached_tokens));
    const [outcome, why] = OUTCOMES[row.cache_outcome] ?? ["", ""];
    put(cells.outcome, outcome);
    cells.outcome.title = why;
    const words = blocks.length ? number(blocks.length) : "";
    if (cells.blocks.textContent !== (shared ? `${words}, ${number(shared)} shared` : words)) {
      cells.blocks.replaceChildren(words, ...(shared ? [el("small", {}, `, ${number(shared)} shared`)] : []));
    }
    tr.classList.toggle("done", row.state === "done");
    tr.setAttribute("aria-selected", String(state.selected === row.seq_id));
    button.setAttribute("aria-pressed", String(state.selected === row.seq_id));
  }

  summarize() {
    const gauges = state.gauges;
    if (!gauges) return;
    const parts = [`${number(gauges.num_running)} running`];
    if (gauges.num_waiting) parts.push(`${number(gauges.num_waiting)} waiting`);
    if (gauges.num_swapped) parts.push(`${number(gauges.num_swapped)} swapped`);
    if (gauges.num_preemptions) parts.push(plural(gauges.num_preemptions, "preemption"));
    if (state.rows.size >= MAX_LISTED) parts.push(`the first ${state.rows.size} are listed`);
    byId("requests-summary").textContent = parts.join(" · ");
  }

  /** Which block holds which part of the selected request. */
  drawTable() {
    const view = byId("table-view");
    const row = state.selected === null ? null : state.rowOf(state.selected);
    view.hidden = !row;
    if (!row) {
      this.tableOf = null;
      return;
    }
    const isDone = row.state === "done";
    const blocks = state.blocksOf(row.seq_id);
    if (this.tableOf !== row.seq_id) {
      this.tableOf = row.seq_id;
      this.cells = el("div", { className: "cells" });
      this.title = el("h3");
      this.rest = el("p", { className: "note" });
      view.replaceChildren(this.title, this.cells, this.rest);
    }
    this.title.textContent = `${shortName(row)}: ${isDone ? "ended; it had these blocks" : "its block table, in order of its tokens"}`;
    this.rest.textContent = blocks.length > MAX_CELLS ? `and ${number(blocks.length - MAX_CELLS)} more` : "";
    // Cells are kept while the table grows: one of them may have the focus.
    blocks.slice(0, MAX_CELLS).forEach((block, i) => this.drawTableCell(row, block, i, isDone));
    while (this.cells.children.length > blocks.length) this.cells.lastChild.remove();
  }

  drawTableCell(row, block, i, isDone) {
    const isShared = !isDone && (state.codes[block] & 7) === SHARED;
    let cell = this.cells.children[i];
    if (!cell) {
      cell = el("button", { type: "button", className: "cell", onclick: () => this.openBlock(Number(cell.textContent)) });
      cell.style.setProperty("--cell", colour(row.seq_id));
      this.cells.append(cell);
    }
    if (cell.textContent !== String(block)) {
      const first = i * state.info.block_size;
      cell.textContent = block;
      cell.title = `tokens ${first} to ${first + state.info.block_size - 1} are in block ${block}`;
      cell.setAttribute("aria-label", cell.title);
    }
    cell.classList.toggle("shared", isShared);
    cell.classList.toggle("done", isDone);
  }

  drawHost() {
    const swapped = [...state.hostTables].filter(([seqId]) => state.rows.has(seqId));
    byId("host").hidden = !swapped.length;
    byId("host-list").replaceChildren(
      ...swapped.map(([seqId, runs]) => {
        const count = runs.reduce((sum, value, i) => sum + (i % 2 ? value : 0), 0);
        const swatch = el("i", { className: "swatch" });
        swatch.style.background = colour(seqId);
        return el("li", { className: "chip" }, swatch, `${shortName(state.rows.get(seqId))}, ${plural(count, "block")}`);
      }),
    );
  }
}
