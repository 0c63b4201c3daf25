// The controls: a table of fields and the form built from it.
const powers = (most) => Array.from({ length: Math.log2(most) + 1 }, (_, i) => 2 ** i);
const divisors = (n, most) => Array.from({ length: Math.min(n, most) }, (_, i) => i + 1).filter((d) => n % d === 0);

// kind: list, slider (stops(state) and a number input), number, tick
const FIELDS = [
  { key: "model", group: "Model", label: "Model", kind: "list", value: "llama2-7b" },
  ...[["layers", "Layers"], ["channels", "Channels"], ["heads", "Heads"], ["kv_heads", "Key-value heads"],
    ["head_dim", "Channels per head"], ["ffn", "Feed-forward hidden channels"], ["experts", "Experts"],
    ["experts_per_token", "Experts per token"], ["vocab", "Vocabulary"], ["context", "Context length (tokens)"]]
    .map(([key, label]) => ({ key, label, group: "Sizes", kind: "number" })),
  { key: "gated", group: "Sizes", label: "Gated feed-forward layers (SwiGLU)", kind: "tick" },
  { key: "tied", group: "Sizes", label: "Tied embeddings", kind: "tick" },
  { key: "hardware", group: "Machines", label: "Hardware", kind: "list", value: "h100" },
  { key: "software", group: "Machines", label: "Software", kind: "list", value: "tessera" },
  { key: "ranks", group: "Machines", label: "Ranks (GPUs)", kind: "slider", value: 8, stops: () => powers(16384) },
  { key: "batch", group: "Machines", label: "Batch: sequences per step", kind: "slider", value: 32, stops: () => powers(8192) },
  { key: "pp", group: "Plan", label: "Pipeline (pp): partitions layers", kind: "slider", value: 4, stops: (s) => divisors(s.ranks, 128) },
  { key: "tp", group: "Plan", label: "Tensor (tp): shards matrices", kind: "slider", value: 1, stops: (s) => divisors(s.ranks, 64) },
  { key: "cp", group: "Plan", label: "Context (cp): shards tokens", kind: "slider", value: 1, stops: (s) => divisors(s.ranks, 64) },
  { key: "ep", group: "Plan", label: "Experts (ep): group size", kind: "slider", value: 1, stops: (s) => divisors(s.ranks, 64) },
  { key: "sequences", group: "Plan", label: "Sequences per micro-batch", kind: "slider", value: 1, stops: () => powers(64) },
  { key: "schedule", group: "Plan", label: "Pipeline schedule", kind: "list", value: "1f1b" },
  { key: "chunks", group: "Plan", label: "Virtual stages per pipeline rank", kind: "slider", value: 1, stops: () => [1, 2, 3, 4, 5, 6, 8] },
  { key: "zero", group: "Plan", label: "ZeRO: sharded over data ranks", kind: "list", value: "1" },
  { key: "recompute", group: "Plan", label: "Recomputation (activation checkpointing)", kind: "list", value: "none" },
  { key: "sp", group: "Plan", label: "Sequence parallelism (sp)", kind: "tick", value: false },
];
const FIELD = Object.fromEntries(FIELDS.map((f) => [f.key, f]));
const ZERO = { 0: "nothing", 1: "optimizer state (ZeRO-1)", 2: "optimizer state, gradients (ZeRO-2)", 3: "optimizer state, gradients, parameters (ZeRO-3)" };
const CHUNKS = { interleaved: 2, "zb-v": 2, "v-half": 2, "v-min": 2 };  // minimum of a schedule
const state = Object.fromEntries(FIELDS.filter((f) => "value" in f).map((f) => [f.key, f.value]));
let choices = {};

const node = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const byId = (id) => document.getElementById(id);
const isSize = (key) => FIELD[key].group === "Sizes";
const numberOf = (key) => isSize(key) && !(key in state) ? choices.model[state.model][key] : state[key];

function makeField(f) {
  const id = f.key, field = node("div", { className: "field " + (f.kind === "number" ? "short" : f.kind) });
  const error = node("p", { id: id + "-error", className: "error" });
  error.setAttribute("role", "alert");
  field.append(node("label", { htmlFor: id, textContent: f.label }));
  if (f.kind === "list") {
    field.append(node("select", { id }));
  } else if (f.kind === "tick") {
    field.prepend(node("input", { id, type: "checkbox" }));
  } else {
    if (f.kind === "slider") {
      const slider = node("input", { id: id + "-slider", type: "range", min: 0, step: 1 });
      slider.setAttribute("aria-label", f.label);
      field.append(slider);
    }
    field.append(node("input", { id, type: "number", min: 0, max: 1e9, step: 1, inputMode: "numeric" }));
  }
  field.append(error);
  return field;
}

function makeControls(changed) {
  const form = byId("controls");
  for (const group of ["Model", "Machines", "Plan"]) {
    const set = node("fieldset", {}, node("legend", { textContent: group }));
    set.append(...FIELDS.filter((f) => f.group === group).map(makeField));
    if (group === "Model") {
      const sizes = node("details", { id: "sizes" }, node("summary", { textContent: "Model sizes" }));
      sizes.append(...FIELDS.filter((f) => f.group === "Sizes").map(makeField));
      set.append(sizes);
    }
    if (group === "Plan") set.append(node("p", { id: "derived", className: "derived" }));
    form.append(set);
  }
  const fill = (key, names, words = {}) =>
    byId(key).append(...names.map((name) => node("option", { value: name, textContent: words[name] || name })));
  fill("model", Object.keys(choices.model));
  fill("hardware", Object.keys(choices.hardware),
    Object.fromEntries(Object.entries(choices.hardware).map(([name, h]) => [name, h.words])));
  fill("software", choices.software);
  fill("schedule", choices.schedule);
  fill("recompute", choices.recompute);
  fill("zero", Object.keys(ZERO), ZERO);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    const key = event.target.id.replace(/-slider$/, ""), f = FIELD[key];
    if (!f) return;
    if (event.target.type === "range") state[key] = f.stops(state)[event.target.valueAsNumber];
    else if (f.kind === "tick") state[key] = event.target.checked;
    else if (f.kind === "list") state[key] = event.target.value;
    else state[key] = event.target.valueAsNumber;
    if (key === "model") for (const size of FIELDS.filter((x) => x.group === "Sizes")) delete state[size.key];
    if (key === "schedule") state.chunks = CHUNKS[state.schedule] || 1;
    changed(event.target);
  });
}

// Updates every control from the state, except the one being edited.
function showState(except) {
  for (const f of FIELDS) {
    const control = byId(f.key), value = numberOf(f.key);
    if (f.kind === "tick") control.checked = value;
    else if (control !== except) control.value = value;
    if (f.kind !== "slider") continue;
    const slider = byId(f.key + "-slider"), stops = f.stops(state);
    const nearest = stops.reduce((best, stop, i) => Math.abs(stop - value) < Math.abs(stops[best] - value) ? i : best, 0);
    slider.max = stops.length - 1;
    slider.disabled = stops.length < 2;
    slider.value = nearest;
    slider.setAttribute("aria-valuetext", String(value));
  }
  byId("ep").closest(".field").hidden = !(numberOf("experts") > 0);
  byId("chunks").closest(".field").hidden = !(state.schedule in CHUNKS);
}

const dataRanks = () => state.ranks / (state.pp * state.tp * state.cp);
const microbatches = () => state.batch / (dataRanks() * state.sequences);

// Checks the state before the planner is queried: {field, error}, or null.
function findError() {
  for (const f of FIELDS)
    if ((f.kind === "slider" || f.kind === "number") && !Number.isSafeInteger(numberOf(f.key)))
      return { field: f.key, error: "Expected an integer." };
  const { ranks, batch, pp, tp, cp, sequences } = state;
  if (!Number.isInteger(dataRanks()) || ranks < 1) {
    const field = ["pp", "tp", "cp"].find((axis) => ranks % state[axis] !== 0) || (cp > 1 ? "cp" : tp > 1 ? "tp" : "pp");
    return { field, error: `${ranks} ranks are not divisible by pp ${pp} x tp ${tp} x cp ${cp} = ${pp * tp * cp}.` };
  }
  if (!Number.isInteger(microbatches()) || batch < 1)
    return { field: batch % dataRanks() ? "batch" : "sequences",
      error: `A batch of ${batch} is not divisible by ${dataRanks()} data ranks x ${sequences} sequences per micro-batch.` };
  return null;
}

function showError(found) {
  for (const shown of document.querySelectorAll(".error")) shown.textContent = "";
  for (const control of document.querySelectorAll("[aria-invalid]")) {
    control.removeAttribute("aria-invalid");
    control.removeAttribute("aria-describedby");
  }
  const key = found && { dp: "ranks", microbatches: "batch" }[found.field] || found && found.field;
  if (!key || !FIELD[key]) return;
  if (isSize(key)) byId("sizes").open = true;
  byId(key + "-error").textContent = found.error;
  byId(key).setAttribute("aria-invalid", "true");
  byId(key).setAttribute("aria-describedby", key + "-error");
}
// Every change of a control queries the planner, which returns HTML.

// The URL fragment stores the complete state, so every view is a link.
function linkOfState() {
  const words = new URLSearchParams();
  for (const f of FIELDS) if (f.key in state) words.set(f.key, state[f.key]);
  return "#" + words;
}

// Sets the valid values of a link; returns the invalid ones.
function takeLink(hash) {
  const rejected = [];
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const f = FIELD[key];
    if (f && f.kind === "list" && [...byId(key).options].some((o) => o.value === text)) state[key] = text;
    else if (f && f.kind === "tick" && /^(true|false)$/.test(text)) state[key] = text === "true";
    else if (f && /^(slider|number)$/.test(f.kind) && /^[0-9]{1,9}$/.test(text)) state[key] = Number(text);
    else rejected.push(`${key}=${text}`.slice(0, 60));
  }
  return rejected;
}

// Queries for the current state.
function modelQuery() {
  const words = new URLSearchParams({ model: state.model, hardware: state.hardware, software: state.software });
  for (const f of FIELDS) if (f.group === "Sizes" && f.key in state) words.set(f.key, state[f.key]);
  return words;
}
function predictQuery() {
  const words = modelQuery();
  for (const key of ["pp", "tp", "cp", "sequences", "schedule", "zero", "recompute", "sp"]) words.set(key, state[key]);
  words.set("dp", dataRanks());
  words.set("microbatches", microbatches());
  words.set("chunks", state.schedule in CHUNKS ? state.chunks : 1);
  if (numberOf("experts") > 0) words.set("ep", state.ep);
  for (const [key, id] of [["wide", "memory"], ["narrow", "time"]]) words.set(key, Math.max(260, byId(id).clientWidth - 32));
  return words;
}
function searchQuery() {
  const words = modelQuery();
  words.set("ranks", state.ranks);
  words.set("batch", state.batch);
  return words;
}

// Sends one query of a kind at a time; while it is pending, only the newest further query is kept. null cancels it.
function asker(path, delay, done) {
  let timer = 0, busy = false, newest = null, answered = null;
  async function ask() {
    if (busy || newest === null || newest === answered) return;
    const query = newest;
    let answer, again = false;
    busy = true;
    try {
      const response = await fetch(`${path}?${query}`);
      again = response.status === 503;  // busy with a query of another page
      answer = await response.json();
    } catch {
      answer = { error: "The server does not respond. Is `tessera explore` still running?" };
    }
    busy = false;
    if (query !== newest || again) return setTimeout(ask, again ? 1000 : 0);
    answered = query;
    done(answer);
  }
  return (query) => {
    if (query === newest) return false;
    newest = query;
    answered = null;
    clearTimeout(timer);
    if (query !== null) timer = setTimeout(ask, delay);
    return true;
  };
}

const plain = (text) => text.replace(/^`[\w.]+`: /, "").replace(/`/g, "");
function showInvalid(found) {
  byId("prediction").classList.add("stale");
  byId("prediction").setAttribute("aria-busy", "false");
  byId("verdict").className = "bad";
  for (const old of byId("verdict").querySelectorAll("h2, p")) old.remove();
  byId("verdict").prepend(node("h2", { id: "verdict-line", textContent: "Invalid plan." }),
    node("p", { id: "verdict-why", textContent: found.error }));
  showError(found);
}

function showPrediction(p) {
  if (p.error) return showInvalid({ field: (p.field || "").split(".").pop(), error: plain(p.error) });
  const { verdict, ...pictures } = p.html;
  byId("verdict").className = p.fits ? "good" : "bad";
  byId("verdict").innerHTML = verdict;
  for (const [id, { sentence, svg }] of Object.entries(pictures)) {
    const figure = byId(id);
    figure.querySelector("figcaption p").textContent = sentence;
    figure.querySelector("div").innerHTML = svg;
    figure.querySelector("button").hidden = false;
  }
  showError(null);
  byId("prediction").classList.remove("stale");
  byId("prediction").setAttribute("aria-busy", "false");
}

function showSearch(found) {
  byId("ranking").setAttribute("aria-busy", "false");
  if (found.error) byId("found").replaceChildren(node("p", { id: "ranking-line", textContent: plain(found.error) }));
  else byId("found").innerHTML = found.html;
  markShown();
}

// Marks the row of the current plan; schedules without chunks have one chunk.
function markShown() {
  const valueOf = (plan, key) => key === "chunks" && !(plan.schedule in CHUNKS) ? "1" : String(plan[key]);
  for (const button of document.querySelectorAll("[data-plan]")) {
    const row = button.closest("tr"), plan = Object.fromEntries(new URLSearchParams(button.dataset.plan));
    if (Object.keys(plan).every((key) => valueOf(plan, key) === valueOf(state, key))) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

// A self-contained SVG with the current colours.
function svgText(id) {
  const svg = byId(id).querySelector("svg").cloneNode(true), look = getComputedStyle(document.documentElement);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const css = byId("picture-style").textContent.replace(/var\((--[\w-]+)\)/g, (_, name) => look.getPropertyValue(name).trim());
  svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  svg.setAttribute("viewBox", `-16 -16 ${width + 32} ${height + 32}`);
  svg.setAttribute("width", width + 32);
  svg.setAttribute("height", height + 32);
  svg.insertAdjacentHTML("afterbegin", `<style>${css}</style>
    <rect x="-16" y="-16" width="${width + 32}" height="${height + 32}" fill="${look.getPropertyValue("--card").trim()}"/>`);
  return new XMLSerializer().serializeToString(svg);
}
function saveSvg(id) {
  const url = URL.createObjectURL(new Blob([svgText(id)], { type: "image/svg+xml" }));
  const link = node("a", { href: url, download: `tessera-${id}.svg` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const predict = asker("/predict", 60, showPrediction), search = asker("/search", 200, showSearch);

function changed(control) {
  showState(control);
  const wrong = findError();
  byId("derived").textContent = wrong ? "" : `The plan has ${dataRanks()} data rank${dataRanks() > 1 ? "s" : ""} (dp), each with ` +
    `${microbatches()} micro-batch${microbatches() > 1 ? "es" : ""} per step.`;
  history.replaceState(null, "", linkOfState());
  markShown();
  if (search(searchQuery().toString())) byId("ranking").setAttribute("aria-busy", "true");
  if (wrong) {
    predict(null);
    return showInvalid(wrong);
  }
  if (predict(predictQuery().toString())) byId("prediction").setAttribute("aria-busy", "true");
}

async function begin() {
  choices = await (await fetch("/choices")).json();
  makeControls(changed);
  const rejected = takeLink(location.hash);
  changed();
  if (rejected.length) byId("copied").textContent = `Invalid values in the link: ${rejected.join(", ")}`;
  addEventListener("hashchange", () => {
    takeLink(location.hash);
    changed();
  });
  byId("copy-link").addEventListener("click", async () => {
    await navigator.clipboard.writeText(location.href);
    byId("copied").textContent = "Copied.";
  });
  addEventListener("resize", () => changed());
  for (const figure of document.querySelectorAll("figure"))
    figure.querySelector("button").addEventListener("click", () => saveSvg(figure.id));
  byId("found").addEventListener("click", (event) => {
    const chosen = event.target.closest("tr")?.querySelector("[data-plan]");
    if (!chosen) return;
    takeLink(chosen.dataset.plan);
    changed();
  });
}
begin();
