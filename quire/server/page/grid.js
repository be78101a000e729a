// The block grid: one cell a block on a canvas, however many there are. A second canvas on top has the marks.
import { byId, number, plural } from "./dom.js";
import { state, hue, shortName, FREE, CACHED, IN_USE, SHARED, IN_TRANSIT, PINNED, STATE_NAMES } from "./state.js";

const PITCHES = [24, 22, 20, 18, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2]; // px from cell to cell, the largest that fits
const MAX_HEIGHT = 380;
const MOST_HEIGHT = 560; // for pools that need it
const PULSE_MS = 700;
const MARGIN = 4; // around the grid, for the marks of its outermost blocks
const RANK = [0, 1, 3, 4, 2]; // of states: where one cell stands for several blocks, the highest is shown

export class Grid {
  constructor(open) {
    this.open = open; // called with a block that was clicked, or null
    this.frame = byId("grid-frame");
    this.base = byId("grid");
    this.marks = byId("grid-marks");
    this.cursor = null; // where the keyboard is
    this.hovered = null;
    this.opened = null;
    this.pulses = new Map(); // cell: when it changed
    this.members = null; // blocks of the selected request
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.readColours();

    state.addEventListener("hello", () => this.layOut());
    state.addEventListener("blocks", (event) => this.onBlocks(event.detail));
    state.addEventListener("selected", () => this.onSelected());
    state.addEventListener("rows", () => this.onRows());
    addEventListener("quire-theme", () => { this.readColours(); this.drawAll(); });
    new ResizeObserver(() => this.layOut()).observe(this.frame);
    this.marks.addEventListener("pointermove", (event) => this.hover(this.blockAt(event)));
    this.marks.addEventListener("pointerleave", () => this.hover(null));
    this.marks.addEventListener("click", (event) => this.choose(this.blockAt(event)));
    this.marks.addEventListener("keydown", (event) => this.onKey(event));
    this.marks.addEventListener("focus", () => {
      this.cursor ??= this.opened ?? 0;
      this.drawMarks();
      this.say();
    });
    this.marks.addEventListener("blur", () => this.drawMarks());
  }

  // -- where things are

  layOut() {
    const count = state.codes.length;
    const width = Math.floor(this.frame.clientWidth);
    if (!count || width < 20) return;
    const ratio = devicePixelRatio || 1;
    if (width === this.width && count === this.count && ratio === this.ratio) return;
    Object.assign(this, { width, count, ratio });
    this.pitch = PITCHES.find((pitch) => {
      const limit = pitch > 3 ? MAX_HEIGHT : MOST_HEIGHT;
      return Math.ceil(count / Math.floor(width / pitch)) * pitch <= limit;
    }) ?? PITCHES.at(-1);
    this.columns = Math.floor(width / this.pitch);
    const most = this.columns * Math.floor(MOST_HEIGHT / this.pitch);
    this.perCell = Math.max(1, Math.ceil(count / most));
    this.cells = Math.ceil(count / this.perCell);
    this.columns = Math.min(this.columns, this.cells);
    this.gap = this.pitch >= 10 ? 2 : this.pitch >= 4 ? 1 : 0;
    const right = this.columns * this.pitch;
    const bottom = Math.ceil(this.cells / this.columns) * this.pitch;
    for (const [canvas, margin] of [[this.base, 0], [this.marks, MARGIN]]) {
      canvas.width = Math.round((right + 2 * margin) * ratio);
      canvas.height = Math.round((bottom + 2 * margin) * ratio);
      canvas.style.width = `${right + 2 * margin}px`;
      canvas.style.height = `${bottom + 2 * margin}px`;
      canvas.style.left = canvas.style.top = `${-margin}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, margin * ratio, margin * ratio);
    }
    Object.assign(this.marks.dataset, { pitch: this.pitch, columns: this.columns, perCell: this.perCell });
    this.drawAll();
  }

  blockAt(event) {
    if (!this.cells) return null;
    const column = Math.floor((event.offsetX - MARGIN) / this.pitch);
    const cell = Math.floor((event.offsetY - MARGIN) / this.pitch) * this.columns + column;
    return column >= 0 && column < this.columns && cell >= 0 && cell < this.cells ? cell * this.perCell : null;
  }

  place(cell) {
    return [(cell % this.columns) * this.pitch, Math.floor(cell / this.columns) * this.pitch];
  }

  // -- drawing

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.fills = [read("--free"), read("--cached"), "", read("--shared"), read("--transit")];
    this.sharedInk = read("--shared-ink");
    this.pin = read("--pin");
    this.ring = read("--ring");
    this.used = `${read("--used-lightness")} ${read("--used-chroma")}`;
    this.usedFills = new Map();
  }

  usedFill(seqId) {
    let fill = this.usedFills.get(seqId);
    if (!fill) {
      if (this.usedFills.size > 5000) this.usedFills.clear();
      fill = seqId ? `oklch(${this.used} ${hue(seqId).toFixed(1)})` : this.fills[CACHED];
      this.usedFills.set(seqId, fill);
    }
    return fill;
  }

  drawAll() {
    if (!this.cells) return;
    const context = this.base.getContext("2d");
    context.clearRect(0, 0, this.base.width, this.base.height);
    for (let cell = 0; cell < this.cells; cell++) this.drawCell(context, cell);
    this.drawMarks();
  }

  /** The block that a cell shows. */
  shown(cell) {
    if (this.perCell === 1) return cell;
    const first = cell * this.perCell;
    const end = Math.min(first + this.perCell, this.count);
    let best = first;
    for (let block = first + 1; block < end; block++) {
      if (RANK[state.codes[block] & 7] > RANK[state.codes[best] & 7]) best = block;
    }
    return best;
  }

  drawCell(context, cell) {
    const block = this.shown(cell);
    const code = state.codes[block] & 7;
    const [x, y] = this.place(cell);
    const size = this.pitch - this.gap;
    context.clearRect(x, y, this.pitch, this.pitch);
    context.globalAlpha = this.members && !this.members.has(block) && code !== FREE ? 0.2 : 1;
    context.fillStyle = code === IN_USE ? this.usedFill(state.seqIds[block]) : this.fills[code];
    if (size >= 6) {
      context.beginPath();
      context.roundRect(x, y, size, size, Math.min(4, size / 4));
      context.fill();
    } else {
      context.fillRect(x, y, size, size);
    }
    if (code === SHARED && size >= 11) {
      context.fillStyle = this.sharedInk;
      context.font = `500 ${Math.round(size * 0.55)}px ui-sans-serif, system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      const count = state.refCounts[block];
      context.fillText(count > 99 ? "+" : count, x + size / 2, y + size / 2 + 0.5);
    }
    if (state.codes[block] & PINNED) {
      const corner = Math.max(2, size * 0.45);
      context.fillStyle = this.pin;
      context.beginPath();
      context.moveTo(x + size - corner, y);
      context.lineTo(x + size, y);
      context.lineTo(x + size, y + corner);
      context.fill();
    }
    context.globalAlpha = 1;
  }

  drawMarks() {
    if (!this.cells) return;
    const context = this.marks.getContext("2d");
    context.clearRect(-MARGIN, -MARGIN, this.marks.width, this.marks.height);
    const now = performance.now();
    const size = this.pitch - this.gap;
    context.lineWidth = 1.5;
    context.strokeStyle = this.ring;
    for (const [cell, since] of this.pulses) {
      const age = (now - since) / PULSE_MS;
      if (age >= 1) {
        this.pulses.delete(cell);
        continue;
      }
      const [x, y] = this.place(cell);
      context.globalAlpha = 0.5 * (1 - age);
      context.strokeRect(x - 0.5, y - 0.5, size + 1, size + 1);
    }
    context.globalAlpha = 1;
    const ring = (block, width) => {
      if (block === null || block >= this.count) return;
      const [x, y] = this.place(Math.floor(block / this.perCell));
      const grown = Math.max(size, 6) + 3;
      const offset = (grown - size) / 2;
      context.lineWidth = width;
      context.beginPath();
      context.roundRect(x - offset, y - offset, grown, grown, 4);
      context.stroke();
    };
    ring(this.hovered, 1.2);
    ring(this.opened, 2.2);
    if (document.activeElement === this.marks) {
      context.setLineDash([3, 2]);
      ring(this.cursor, 2);
      context.setLineDash([]);
    }
    if (this.pulses.size && !this.frameRequested) {
      this.frameRequested = true;
      requestAnimationFrame(() => { this.frameRequested = false; this.drawMarks(); });
    }
  }

  // -- what happens

  onBlocks({ first, scanned, changed }) {
    if (!this.cells) return;
    const context = this.base.getContext("2d");
    const redraw = new Set();
    for (let block = first; block < first + scanned; block++) redraw.add(Math.floor(block / this.perCell));
    const pulse = !this.calm.matches && this.pitch >= 6 && changed.length <= 600;
    const now = performance.now();
    for (const block of changed) {
      const cell = Math.floor(block / this.perCell);
      redraw.add(cell);
      if (pulse) this.pulses.set(cell, now);
    }
    for (const cell of redraw) if (cell < this.cells) this.drawCell(context, cell);
    this.drawMarks();
    this.summarize();
  }

  summarize() {
    const counts = [0, 0, 0, 0, 0];
    let pinned = 0;
    for (const code of state.codes) {
      counts[code & 7]++;
      if (code & PINNED) pinned++;
    }
    const parts = [`${number(counts[IN_USE] + counts[SHARED])} in use`];
    if (counts[SHARED]) parts.push(`${number(counts[SHARED])} of them shared`);
    parts.push(`${number(counts[CACHED])} cached`, `${number(counts[FREE])} free`);
    if (counts[IN_TRANSIT]) parts.push(`${number(counts[IN_TRANSIT])} moving`);
    if (pinned) parts.push(`${number(pinned)} pinned`);
    if (this.perCell > 1) parts.push(`${this.perCell} blocks a cell`);
    byId("blocks-summary").textContent = parts.join(" · ");
  }

  onSelected() {
    this.members = state.selected === null ? null : new Set(state.blocksOf(state.selected));
    this.drawAll();
  }

  onRows() {
    if (state.selected === null) return;
    const members = new Set(state.blocksOf(state.selected));
    if (members.size !== this.members?.size) {
      this.members = members;
      this.drawAll();
    }
  }

  hover(block) {
    if (block === this.hovered) return;
    this.hovered = block;
    this.marks.title = block === null ? "" : this.describe(block);
    this.drawMarks();
  }

  choose(block) {
    if (block === null) return;
    this.cursor = block;
    this.show(this.shown(Math.floor(block / this.perCell)));
  }

  /** Mark a block as the open one, and have its details shown. */
  show(block) {
    this.opened = block;
    this.drawMarks();
    this.open(block);
  }

  onKey(event) {
    const row = this.columns * this.perCell;
    const moves = {
      ArrowLeft: -this.perCell, ArrowRight: this.perCell, ArrowUp: -row, ArrowDown: row,
      PageUp: -10 * row, PageDown: 10 * row, Home: -Infinity, End: Infinity,
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const last = (this.cells - 1) * this.perCell;
      this.cursor = Math.min(last, Math.max(0, (this.cursor ?? 0) + moves[event.key]));
      this.drawMarks();
      this.say();
    } else if (event.key === "Enter" || event.key === " ") {
      this.choose(this.cursor);
    } else if (event.key === "Escape") {
      this.show(null);
      state.select(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  describe(block) {
    const code = state.codes[block] & 7;
    let text = `block ${number(block)}, ${STATE_NAMES[code]}`;
    if (this.perCell > 1) text = `blocks ${number(block)} to ${number(Math.min(block + this.perCell, this.count) - 1)}`;
    const row = code === IN_USE ? state.rowOf(state.seqIds[block]) : null;
    if (row) text += ` by ${shortName(row)}`;
    if (code === SHARED) text += ` by ${plural(state.refCounts[block], "sequence")}`;
    if (state.codes[block] & PINNED) text += ", pinned";
    return text;
  }

  say() {
    byId("grid-said").textContent = this.describe(this.cursor);
  }
}
