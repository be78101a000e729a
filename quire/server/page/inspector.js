// One block in detail: who uses it, where it stands in their tokens, and what text it holds.
import { request } from "./api.js";
import { byId, el, number, plural } from "./dom.js";
import { state, colour, shortName } from "./state.js";

const STATES = { free: "free", cached: "cached, nobody uses it", in_use: "in use", in_transit: "swapping to or from host memory" };

export class Inspector {
  constructor() {
    this.view = byId("inspector");
    this.block = null;
    this.asked = 0;
    // What is open stays true: ask again when the block changes, or may have been filled further.
    state.addEventListener("blocks", ({ detail }) => { if (detail.changed.includes(this.block)) this.ask(); });
    setInterval(() => { if (this.isGrowing && !document.hidden) this.ask(); }, 1000);
  }

  open(block) {
    this.block = block;
    this.isGrowing = false;
    if (block === null) {
      this.view.replaceChildren(el("p", { className: "note" }, "Click a block to see who uses it and what text it holds."));
      return;
    }
    this.ask();
  }

  async ask() {
    const number = ++this.asked;
    try {
      const found = await (await request(`/debug/kv/blocks/${this.block}?${new URLSearchParams({ model: state.info.model, engine: state.info.engine })}`)).json();
      if (number === this.asked) this.show(found);
    } catch (error) {
      if (number === this.asked) this.view.replaceChildren(el("p", { className: "note" }, error.message));
    }
  }

  show(found) {
    this.isGrowing = found.users.length > 0 && found.num_tokens < found.block_size;
    const facts = el("p", { className: "facts" }, el("strong", {}, `Block ${number(found.block_id)}`));
    const fact = (text, strong) => facts.append(el("span", {}, ...(strong ? [el("b", {}, strong), " "] : []), text));
    fact(found.ref_count > 1 ? `shared by ${plural(found.ref_count, "sequence")}` : STATES[found.state]);
    if (found.num_tokens && found.chain_index !== null) {
      const first = found.chain_index * found.block_size;
      fact(`tokens ${number(first)} to ${number(first + found.num_tokens - 1)}`);
    }
    if (found.num_tokens) fact(`of ${found.block_size} slots filled`, String(found.num_tokens));
    if (found.hash) fact(`${found.num_hits === 1 ? "hit" : "hits"} by later prompts`, number(found.num_hits));
    if (found.num_pins) fact("pinned");
    if (found.hash) fact(`hash ${found.hash}`);
    const parts = [facts];
    if (found.users.length) parts.push(el("ul", { className: "users", "aria-label": "Used by" }, ...found.users.map((user) => this.user(user))));
    parts.push(this.text(found));
    this.view.replaceChildren(...parts);
  }

  user(row) {
    const swatch = el("i", { className: "swatch" });
    swatch.style.background = colour(row.seq_id);
    const select = () => state.select(state.selected === row.seq_id ? null : row.seq_id);
    return el("li", {}, el("button", { type: "button", onclick: select, title: row.request_id }, swatch, shortName(row)));
  }

  text(found) {
    if (!found.is_readable) return el("p", { className: "note" }, "Its text is another key's.");
    if (!found.num_tokens) return el("p", { className: "note" }, found.state === "free" ? "Nothing in it is known." : "Nothing is written yet.");
    if (!found.tokens) return el("p", { className: "text" }, `token ids ${found.token_ids.join(" ")}`);
    const shown = (piece) => piece.replaceAll("\n", "↵\n");
    return el("p", { className: "text" }, ...found.tokens.map((piece, i) => el("span", { title: `token ${found.token_ids[i]}` }, shown(piece))));
  }
}
