// Whenever something is chosen, the planner is asked, and shows what it found in HTML of its own.

// The view is a link, too: what stands behind the # is the state, and nothing else is kept.
function linkOfState() {
  const words = new URLSearchParams();
  for (const f of FIELDS) if (f.key in state) words.set(f.key, state[f.key]);
  return "#" + words;
}

// Takes from a link what can be a value of its control; the rest is named.
function takeLink(hash) {
  const refused = [];
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const f = FIELD[key];
    if (f && f.kind === "list" && [...byId(key).options].some((o) => o.value === text)) state[key] = text;
    else if (f && f.kind === "tick" && /^(true|false)$/.test(text)) state[key] = text === "true";
    else if (f && /^(slider|number)$/.test(f.kind) && /^[0-9]{1,9}$/.test(text)) state[key] = Number(text);
    else refused.push(`${key}=${text}`.slice(0, 60));
  }
  return refused;
}

// Questions to the server about this state.
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

// Asks one question of a kind at a time: questions that come meanwhile wait, and only the newest of them is asked. null
// takes the question back.
function asker(path, delay, done) {
  let timer = 0, busy = false, newest = null, answered = null;
  async function ask() {
    if (busy || newest === null || newest === answered) return;
    const query = newest;
    let answer, again = false;
    busy = true;
    try {
      const response = await fetch(`${path}?${query}`);
      again = response.status === 503;  // it works on what another page asked
      answer = await response.json();
    } catch {
      answer = { error: "The server does not answer. Does `tessera explore` still run?" };
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
function showImpossible(found) {
  byId("prediction").classList.add("stale");
  byId("prediction").setAttribute("aria-busy", "false");
  byId("verdict").className = "bad";
  for (const old of byId("verdict").querySelectorAll("h2, p")) old.remove();
  byId("verdict").prepend(node("h2", { id: "verdict-line", textContent: "There is no such plan." }),
    node("p", { id: "verdict-why", textContent: found.error }));
  showError(found);
}

function showPrediction(p) {
  if (p.error) return showImpossible({ field: (p.field || "").split(".").pop(), error: plain(p.error) });
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

// The row of the plan that is shown; a schedule without chunks has one.
function markShown() {
  const valueOf = (plan, key) => key === "chunks" && !(plan.schedule in CHUNKS) ? "1" : String(plan[key]);
  for (const button of document.querySelectorAll("[data-plan]")) {
    const row = button.closest("tr"), plan = Object.fromEntries(new URLSearchParams(button.dataset.plan));
    if (Object.keys(plan).every((key) => valueOf(plan, key) === valueOf(state, key))) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

// The picture with its colours of now, so that it needs nothing else.
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
  const wrong = impossible();
  byId("derived").textContent = wrong ? "" : `So there are ${dataRanks()} data rank${dataRanks() > 1 ? "s" : ""} (dp), and each makes ` +
    `${microbatches()} micro-batch${microbatches() > 1 ? "es" : ""} in a step.`;
  history.replaceState(null, "", linkOfState());
  markShown();
  if (search(searchQuery().toString())) byId("ranking").setAttribute("aria-busy", "true");
  if (wrong) {
    predict(null);
    return showImpossible(wrong);
  }
  if (predict(predictQuery().toString())) byId("prediction").setAttribute("aria-busy", "true");
}

async function begin() {
  choices = await (await fetch("/choices")).json();
  makeControls(changed);
  const refused = takeLink(location.hash);
  changed();
  if (refused.length) byId("copied").textContent = `These values of the link are impossible: ${refused.join(", ")}`;
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
