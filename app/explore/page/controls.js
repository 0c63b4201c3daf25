// The controls: one table of what can be chosen, and the form that is made of it.
const powers = (most) => Array.from({ length: Math.log2(most) + 1 }, (_, i) => 2 ** i);
const divisors = (n, most) => Array.from({ length: Math.min(n, most) }, (_, i) => i + 1).filter((d) => n % d === 0);

// kind: list, slider (stops(state) beside a number), number, tick
const FIELDS = [
  { key: "model", group: "Model", label: "Model", kind: "list", value: "llama2-7b" },
  ...[["layers", "Layers"], ["channels", "Channels"], ["heads", "Heads"], ["kv_heads", "Heads of keys and values"],
    ["head_dim", "Numbers of a head"], ["ffn", "Hidden channels of a feed-forward layer"], ["experts", "Experts"],
    ["experts_per_token", "Experts per token"], ["vocab", "Vocabulary"], ["context", "Tokens of a sequence"]]
    .map(([key, label]) => ({ key, label, group: "Sizes", kind: "number" })),
  { key: "gated", group: "Sizes", label: "Gated feed-forward layers (SwiGLU)", kind: "tick" },
  { key: "tied", group: "Sizes", label: "The head is the token table", kind: "tick" },
  { key: "hardware", group: "Machines", label: "Hardware", kind: "list", value: "h100" },
  { key: "software", group: "Machines", label: "Software", kind: "list", value: "tessera" },
  { key: "ranks", group: "Machines", label: "Ranks (cards)", kind: "slider", value: 8, stops: () => powers(16384) },
  { key: "batch", group: "Machines", label: "Batch: sequences of a step", kind: "slider", value: 32, stops: () => powers(8192) },
  { key: "pp", group: "Plan", label: "Pipeline (pp): divides layers", kind: "slider", value: 4, stops: (s) => divisors(s.ranks, 128) },
  { key: "tp", group: "Plan", label: "Tensor (tp): divides matrices", kind: "slider", value: 1, stops: (s) => divisors(s.ranks, 64) },
  { key: "cp", group: "Plan", label: "Context (cp): divides tokens", kind: "slider", value: 1, stops: (s) => divisors(s.ranks, 64) },
  { key: "ep", group: "Plan", label: "Experts (ep): out of data ranks", kind: "slider", value: 1, stops: (s) => divisors(s.ranks, 64) },
  { key: "sequences", group: "Plan", label: "Sequences of a micro-batch", kind: "slider", value: 1, stops: () => powers(64) },
  { key: "schedule", group: "Plan", label: "Schedule of the pipeline", kind: "list", value: "1f1b" },
  { key: "chunks", group: "Plan", label: "Stages of a pipeline rank", kind: "slider", value: 1, stops: () => [1, 2, 3, 4, 5, 6, 8] },
  { key: "zero", group: "Plan", label: "Data ranks share out", kind: "list", value: "1" },
  { key: "recompute", group: "Plan", label: "Made again in the backward pass", kind: "list", value: "none" },
  { key: "sp", group: "Plan", label: "Tensor ranks divide tokens too (sp)", kind: "tick", value: false },
];
const FIELD = Object.fromEntries(FIELDS.map((f) => [f.key, f]));
const ZERO = { 0: "nothing", 1: "state (ZeRO-1)", 2: "and gradients (ZeRO-2)", 3: "and parameters (ZeRO-3)" };
const CHUNKS = { interleaved: 2, "zb-v": 2, "v-half": 2, "v-min": 2 };  // that a schedule has at least
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
      const sizes = node("details", { id: "sizes" }, node("summary", { textContent: "Sizes of the model" }));
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

// Every control as the state has it, but for the one that the user is in.
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

// The first thing that is wrong before the planner is asked: {field, error}, or nothing.
function impossible() {
  for (const f of FIELDS)
    if ((f.kind === "slider" || f.kind === "number") && !Number.isSafeInteger(numberOf(f.key)))
      return { field: f.key, error: "Expected a whole number." };
  const { ranks, batch, pp, tp, cp, sequences } = state;
  if (!Number.isInteger(dataRanks()) || ranks < 1) {
    const field = ["pp", "tp", "cp"].find((axis) => ranks % state[axis] !== 0) || (cp > 1 ? "cp" : tp > 1 ? "tp" : "pp");
    return { field, error: `${ranks} ranks cannot be divided by pp ${pp} x tp ${tp} x cp ${cp} = ${pp * tp * cp}.` };
  }
  if (!Number.isInteger(microbatches()) || batch < 1)
    return { field: batch % dataRanks() ? "batch" : "sequences",
      error: `A batch of ${batch} cannot be divided among ${dataRanks()} data ranks in micro-batches of ${sequences}.` };
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
