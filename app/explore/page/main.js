// What happens when something is chosen: the planner is asked, and the pictures are drawn again.
const HINTS = {
  parameters: "More pipeline or tensor ranks, or ZeRO-3, share them out.",
  gradients: "More pipeline or tensor ranks, or ZeRO-2, share them out.",
  optimizer: "ZeRO-1, or more pipeline or tensor ranks, share it out.",
  activations: "Fewer sequences in a micro-batch, more tensor ranks with sequence parallel, or making them again in the backward pass need less.",
  communication: "Fewer ranks along the axes that gather need less.",
  workspace: "Fewer sequences in a micro-batch need less.",
};
let last = null;

// One question of a kind at a time; what is asked meanwhile waits, and only the newest of it is asked. null takes back
// what was asked.
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
  byId("verdict-line").textContent = "There is no such plan.";
  byId("verdict-why").textContent = found.error;
  showError(found);
}

function showPrediction(p) {
  if (p.error) return showImpossible({ field: (p.field || "").split(".").pop(), error: plain(p.error) });
  last = p;
  const fullest = p.memory_of_stages.findIndex((m) => m.peak === p.memory.peak), range = p.step_s_range;
  byId("verdict").className = p.fits ? "good" : "bad";
  byId("verdict-line").textContent = p.fits ? `It fits, and a step takes ${seconds(p.step_s)}.`
    : `It does not fit: a rank needs ${bytes(p.memory.peak)}, ${bytes(p.over.bytes)} more than it has.`;
  const where = p.memory_of_stages.length > 1 ? `Pipeline rank ${fullest} is the fullest. ` : "";
  byId("verdict-why").textContent = p.fits
    ? (range[1] > range[0] ? `The numbers are those of data sheets: real runs take from ${seconds(range[0])} to ${seconds(range[1])}.` : "")
    : `${where}Most of it: ${nameOf(p.over.largest)}, ${bytes(p.memory[p.over.largest])}. ${HINTS[p.over.largest] || ""}`;
  byId("figures").replaceChildren(...[["step", seconds(p.step_s)], ["tokens/s", count(p.tokens_per_s)],
    ["share of peak", percent(p.mfu)], ["TFLOP/s each", three(p.tflops_per_rank)], ["bubble", percent(p.bubble)],
    ["fullest rank", bytes(p.memory.peak)]]
    .map(([name, value]) => node("div", {}, node("dt", { textContent: name }), node("dd", { textContent: value }))));
  showError(null);
  byId("prediction").classList.remove("stale");
  drawAll();
  byId("prediction").setAttribute("aria-busy", "false");
}
function drawAll() {
  if (last) for (const picture of [drawMemory, drawPipeline, drawTime, drawBytes]) picture(last);
}

function showSearch(found) {
  byId("ranking").setAttribute("aria-busy", "false");
  if (!found.error) return showRanking(found);
  document.querySelector("#ranking table").hidden = true;
  byId("ranking-line").textContent = plain(found.error);
  showAdvice(null);
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
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) drawAll();
    width = innerWidth;
  });
}
begin();
