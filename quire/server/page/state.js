// What the page knows: a copy of the block map, the requests, and who selected what. Others listen to its events.
export const FREE = 0, CACHED = 1, IN_USE = 2, SHARED = 3, IN_TRANSIT = 4, PINNED = 8;
export const STATE_NAMES = ["free", "cached", "in use", "shared", "in transit"];

const DONE_SHOWN_MS = 20000; // a request that ended stays in the table this long
const MAX_DONE = 12;

class State extends EventTarget {
  info = null;
  codes = new Uint8Array(0);
  refCounts = new Uint8Array(0);
  seqIds = new Uint32Array(0);
  rows = new Map(); // by seq_id, in order of arrival
  done = new Map(); // rows that ended lately
  ends = new Map(); // by request id: the output tokens of its sequences, at its end
  tables = new Map(); // by seq_id: [first, count, first, count, ...]
  hostTables = new Map();
  gauges = null;
  selected = null; // a seq_id
  model = null; // the one that is shown; null: the first
  engine = null; // likewise: its replica

  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  take(message) {
    this[`take_${message.type}`]?.(message);
  }

  /** Show another model or replica: nothing of the one before is its own. */
  follow(model, engine) {
    this.model = model;
    this.engine = engine;
    this.select(null);
    for (const kept of [this.rows, this.done, this.ends, this.tables, this.hostTables]) kept.clear();
    this.codes = new Uint8Array(0);
    this.tell("rows");
  }

  take_hello(message) {
    this.fields = message.row_fields;
    this.info = message;
    if (this.codes.length !== message.num_blocks) {
      this.codes = new Uint8Array(message.num_blocks);
      this.refCounts = new Uint8Array(message.num_blocks);
      this.seqIds = new Uint32Array(message.num_blocks);
    }
    this.tell("hello");
  }

  take_status(message) {
    this.tell("status", message);
  }

  take_blocks(message) {
    const codes = bytes(message.codes);
    const refCounts = bytes(message.ref_counts);
    const seqIds = words(message.seq_ids);
    const changed = words(message.block_ids);
    const { first, num_scanned: scanned } = message;
    this.codes.set(codes.subarray(0, scanned), first);
    this.refCounts.set(refCounts.subarray(0, scanned), first);
    this.seqIds.set(seqIds.subarray(0, scanned), first);
    changed.forEach((block, i) => {
      this.codes[block] = codes[scanned + i];
      this.refCounts[block] = refCounts[scanned + i];
      this.seqIds[block] = seqIds[scanned + i];
    });
    this.tell("blocks", { first, scanned, changed });
  }

  take_tables(message) {
    this.tables = new Map(message.tables);
    this.tell("chart", message.chart);
  }

  take_levels(message) {
    this.tell("levels", message);
  }

  take_tick(message) {
    const now = performance.now();
    const rows = new Map();
    for (const values of message.rows) {
      const row = Object.fromEntries(this.fields.map((name, i) => [name, values[i]]));
      rows.set(row.seq_id, row);
    }
    for (const [seqId, row] of this.rows) {
      if (!rows.has(seqId)) this.done.set(seqId, { ...row, state: "done", runs: this.tables.get(seqId), until: now + DONE_SHOWN_MS });
    }
    for (const [seqId, row] of this.done) {
      if (row.until < now || this.done.size > MAX_DONE || rows.has(seqId)) this.done.delete(seqId);
    }
    this.rows = rows;
    this.takeEnds(message.ended);
    for (const [seqId, runs] of message.tables) this.tables.set(seqId, runs);
    for (const seqId of this.tables.keys()) if (!rows.has(seqId)) this.tables.delete(seqId);
    this.hostTables = new Map(message.host_tables);
    if (message.gauges) {
      this.gauges = message.gauges;
      this.tell("chart", [message.gauges]);
    }
    if (this.selected !== null && !rows.has(this.selected) && !this.done.has(this.selected)) this.select(null);
    this.tell("rows");
  }

  /** A row that ended has the count of some moment before; its end may be told earlier or later than the row goes. */
  takeEnds(ended) {
    for (const [requestId, counts] of ended) this.ends.set(requestId, counts);
    for (const row of this.done.values()) row.num_output_tokens = this.ends.get(row.request_id)?.[row.index] ?? row.num_output_tokens;
    const shown = new Set([...this.rows.values(), ...this.done.values()].map((row) => row.request_id));
    for (const requestId of this.ends.keys()) if (!shown.has(requestId)) this.ends.delete(requestId);
  }

  /** Every row to show: what runs and waits, then what ended lately. */
  shownRows() {
    return [...this.rows.values(), ...[...this.done.values()].reverse()];
  }

  rowOf(seqId) {
    return this.rows.get(seqId) ?? this.done.get(seqId);
  }

  blocksOf(seqId) {
    const runs = this.tables.get(seqId) ?? this.done.get(seqId)?.runs ?? [];
    const blocks = [];
    for (let i = 0; i < runs.length; i += 2) for (let k = 0; k < runs[i + 1]; k++) blocks.push(runs[i] + k);
    return blocks;
  }

  select(seqId) {
    if (this.selected === seqId) return;
    this.selected = seqId;
    this.tell("selected");
  }
}

export const state = new State();

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const words = (text) => {
  const found = bytes(text);
  const view = new DataView(found.buffer);
  return Uint32Array.from({ length: found.length / 4 }, (_, i) => view.getUint32(4 * i, true));
};

/** A request's colour, the same for everyone who looks: neighbours in time are far apart on the wheel. */
export function hue(seqId) {
  return (seqId * 137.508 + 210) % 360;
}
export function colour(seqId) {
  return `oklch(var(--used-lightness) var(--used-chroma) ${hue(seqId).toFixed(1)})`;
}

/** "chatcmpl-my-name-1f" was sent as "my-name". */
export function shortName(row) {
  const name = row.request_id.replace(/^(chatcmpl|cmpl)-/, "").replace(/-[0-9a-f]+$/, "");
  return row.index ? `${name} #${row.index + 1}` : name;
}
