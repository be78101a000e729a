// Two conversations with one system prompt, streamed from /v1/chat/completions.
import { lines, request } from "./api.js";
import { byId, el, milliseconds, number } from "./dom.js";
import { Drafts } from "./drafts.js";
import { Markdown } from "./markdown.js";
import { state, colour } from "./state.js";

const tab = Math.random().toString(36).slice(2, 6); // tells this page's requests from another's

class Chat {
  constructor(list, name) {
    this.name = name;
    this.turns = [];
    this.count = 0;
    const piece = byId("chat-template").content.firstElementChild.cloneNode(true);
    this.view = piece;
    this.log = piece.querySelector(".log");
    this.form = piece.querySelector("form");
    this.input = piece.querySelector("textarea");
    this.sendButton = piece.querySelector(".send");
    this.stopButton = piece.querySelector(".stop");
    this.bothButton = piece.querySelector(".both");
    piece.id = `chat-${name}`;
    this.log.setAttribute("aria-label", `Chat ${name}`);
    this.input.setAttribute("aria-label", `Message in chat ${name}`);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.sendInput(); });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.sendInput();
      }
    });
    this.stopButton.addEventListener("click", () => this.controller?.abort());
    piece.querySelector(".clear").addEventListener("click", () => this.clear());
    list.append(piece);
  }

  get isBusy() {
    return Boolean(this.controller);
  }

  clear() {
    this.controller?.abort();
    this.turns = [];
    this.log.replaceChildren();
  }

  sendInput() {
    const text = this.input.value.trim();
    if (!text || this.isBusy) return;
    this.input.value = "";
    this.send(text);
  }

  async send(text) {
    const turns = this.turns;
    turns.push({ role: "user", content: text });
    this.log.append(el("div", { className: "message user" }, text));
    const body = el("div", { className: "body" });
    const footer = el("footer");
    const message = el("div", { className: "message assistant busy" }, body, footer);
    this.log.append(message);
    this.scroll(true);
    this.setBusy(new AbortController());
    const answer = { role: "assistant", content: "" };
    const markdown = new Markdown(body);
    const drafts = new Drafts(footer);
    let frame = 0; // however fast tokens come, they are shown once a frame
    const show = (isGrowing) => {
      cancelAnimationFrame(frame);
      frame = 0;
      markdown.show(answer.content.trimStart(), isGrowing);
      drafts.show();
      this.scroll();
    };
    const requestId = `chat-${this.name}-${++this.count}-${tab}`;
    const painted = this.paint(message, requestId);
    const started = performance.now();
    let firstAt = null;
    let usage = null;
    let ended = "";
    try {
      for await (const chunk of this.chunks(turns, requestId)) {
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices[0];
        const delta = choice?.delta?.content;
        if (delta) {
          firstAt ??= performance.now();
          answer.content += delta;
          drafts.add(delta, usage);
          frame ||= requestAnimationFrame(() => show(true));
        }
        ended = choice?.finish_reason ?? ended;
      }
    } catch (error) {
      if (error.name === "AbortError") ended = "stopped";
      else {
        ended = "failed";
        footer.before(el("p", { className: "error" }, error.message));
      }
    } finally {
      show(false);
      painted();
      this.setBusy(null);
      message.classList.remove("busy");
    }
    if (this.turns === turns) {
      if (answer.content) turns.push(answer);
      else turns.pop(); // a question without an answer would confuse the next
    }
    drafts.end(usage);
    footer.textContent = this.describe({ usage, ended, started, firstAt });
    this.scroll();
  }

  async *chunks(turns, requestId) {
    const system = byId("system").value.trim();
    const temperature = byId("temperature").valueAsNumber;
    const body = {
      model: state.info?.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
      ...state.info?.chat, // how the model wants to be sampled
      ...(Number.isFinite(temperature) ? { temperature: Math.max(0, temperature) } : {}),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true }, // how many of a piece's tokens were drafted
    };
    const most = Math.max(1, byId("max-tokens").valueAsNumber || 160);
    const response = await this.open(body, most, requestId);
    for await (const line of lines(response)) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }

  /** Ask for at most so many tokens, or for as many as are left when the chat has become too long for that. */
  async open(body, most, requestId) {
    const send = (more) => request("/v1/chat/completions", { signal: this.controller.signal, requestId, body: { ...body, ...more } });
    if (most >= (state.info?.max_model_len ?? Infinity)) return send({});
    try {
      return await send({ max_completion_tokens: most });
    } catch (error) {
      if (error.code !== "context_length_exceeded") throw error;
      return send({});
    }
  }

  /** Give the answer its request's colour in the grid, once the engine has shown it. */
  paint(message, requestId) {
    const look = () => {
      for (const row of state.rows.values()) {
        if (row.request_id.includes(requestId)) {
          message.style.setProperty("--request", colour(row.seq_id));
          stop();
          return;
        }
      }
    };
    const stop = () => state.removeEventListener("rows", look);
    state.addEventListener("rows", look);
    return stop;
  }

  describe({ usage, ended, started, firstAt }) {
    const parts = [];
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${number(usage.completion_tokens)} tokens`);
      if (firstAt !== null) parts.push(`first after ${milliseconds((firstAt - started) / 1000)}`);
      parts.push(`${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens from the cache`);
    }
    if (ended === "stopped") parts.push("stopped");
    if (ended === "length") parts.push("cut at the most tokens");
    return parts.join(" · ");
  }

  setBusy(controller) {
    this.controller = controller;
    this.log.setAttribute("aria-busy", String(Boolean(controller)));
    this.sendButton.hidden = Boolean(controller);
    this.stopButton.hidden = !controller;
    this.bothButton.disabled = Boolean(controller);
  }

  /** Follow the text, unless the reader has scrolled back. */
  scroll(always = false) {
    const { log } = this;
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}

export function startChats() {
  const list = byId("chat-list");
  const chats = [new Chat(list, "a")];
  byId("second-chat").addEventListener("click", (event) => {
    const chat = new Chat(list, "b");
    chats.push(chat);
    event.target.hidden = true;
    document.querySelector(".chats").classList.add("two");
    for (const one of chats) {
      one.bothButton.hidden = false;
      one.bothButton.addEventListener("click", () => {
        const text = one.input.value.trim();
        if (!text || chats.some((other) => other.isBusy)) return;
        for (const other of chats) { other.input.value = ""; other.send(text); }
      });
    }
    chat.input.focus();
  });
}

// An empty box means the model's own temperature: it says which that is.
state.addEventListener("hello", () => { byId("temperature").placeholder = state.info.chat.temperature; });
