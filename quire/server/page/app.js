// Puts the parts together, and keeps the connection to the server's live feed.
import { key, lines, request } from "./api.js";
import { startCharts } from "./charts.js";
import { startChats } from "./chat.js";
import { byId, el, number } from "./dom.js";
import { Grid } from "./grid.js";
import { Inspector } from "./inspector.js";
import { startLevels } from "./levels.js";
import { Requests } from "./requests.js";
import { state } from "./state.js";

const RETRY_MS = [500, 1000, 2000, 4000, 8000];

const inspector = new Inspector();
const grid = new Grid((block) => inspector.open(block));
new Requests((block) => grid.show(block));
startCharts();
startLevels();
startChats();

function setStatus(name, words) {
  const view = byId("status");
  view.dataset.state = name;
  view.querySelector("span").textContent = words ?? name;
}

state.addEventListener("status", ({ detail }) => setStatus(detail.state, detail.reason ? `${detail.state}: ${detail.reason}` : detail.state));
state.addEventListener("hello", () => {
  const { info } = state;
  const facts = `${info.device}, ${info.dtype} · ${number(info.num_blocks)} blocks of ${info.block_size} tokens · up to ${number(info.max_model_len)} tokens a request`;
  byId("served").replaceChildren(el("b", {}, info.model), ` · ${facts}`);
  document.title = `${info.model} · Quire`;
});

// -- the models and the replicas to choose from

function showChoices(id, choices, shown, choose) {
  const group = byId(id);
  group.hidden = choices.length < 2;
  group.replaceChildren(...choices.map(([name, words, mark]) => el("button", {
    type: "button",
    className: `quiet ${mark}`,
    "aria-pressed": String(name === shown),
    onclick: () => { choose(name); controller?.abort(); wake(); },
  }, words)));
}
state.addEventListener("status", ({ detail }) => {
  showChoices("engines", detail.engines.map((name) => [name, `replica ${name}`, ""]), state.info?.engine, (name) => state.follow(state.model, name));
  const models = Object.entries(detail.models);
  showChoices("models", models.map(([name, now]) => [name, now === "ready" ? name : `${name}, ${now}`, now]), state.info?.model, (name) => state.follow(name, null));
});

// -- the key

const form = byId("key-form");
function showKeyForm(note) {
  form.hidden = false;
  byId("key-button").setAttribute("aria-expanded", "true");
  if (note) byId("key-note").textContent = note;
}
byId("key-button").addEventListener("click", () => {
  form.hidden = !form.hidden;
  byId("key-button").setAttribute("aria-expanded", String(!form.hidden));
  if (!form.hidden) byId("key").focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  byId("key-note").textContent = "Kept in this tab only.";
  form.hidden = true;
  byId("key-button").setAttribute("aria-expanded", "false");
  wake();
});
addEventListener("quire-key-wanted", ({ detail }) => showKeyForm(detail));

// -- the feed

let controller = null;
let wake = () => {};

async function follow() {
  let failures = 0;
  for (;;) {
    controller = new AbortController();
    try {
      const wanted = Object.entries({ model: state.model, engine: state.engine }).filter(([, name]) => name !== null);
      const response = await request(`/live?${new URLSearchParams(wanted)}`, { signal: controller.signal });
      for await (const line of lines(response)) {
        state.take(JSON.parse(line));
        failures = 0;
      }
      setStatus("offline", "the feed ended");
    } catch (error) {
      if (error.name === "AbortError" && !document.hidden) continue; // another model or replica was chosen
      if (error.status === 401) setStatus("offline", "wants an API key");
      else if (error.status === 404) state.model = state.engine = null; // it was removed: the first one is shown
      else if (error.status === 503) setStatus(error.code || "starting", error.code || "starting");
      else if (document.hidden) setStatus("connecting", "paused");
      else setStatus("offline", error.status ? error.message : "not reachable");
      if (error.status === 401) {
        await new Promise((resolve) => { wake = resolve; });
        continue;
      }
    }
    const wait = RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)];
    await new Promise((resolve) => {
      wake = resolve;
      if (!document.hidden) setTimeout(resolve, wait);
    });
  }
}

// A tab that nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) controller?.abort();
  else wake();
});

follow();
