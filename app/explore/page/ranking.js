// The best plans beside the one that is shown.
const FIXED = ["pp", "tp", "cp", "ep", "sequences", "schedule", "chunks", "zero", "recompute", "sp"];
function planWords(plan) {
  const parts = ["pp", "dp", "cp", "tp", "ep"].filter((axis) => plan[axis] > 1).map((axis) => `${axis} ${plan[axis]}`);
  if (plan.sp) parts.push("sp");
  if (plan.zero) parts.push(`ZeRO-${plan.zero}`);
  if (plan.pp > 1) parts.push(plan.schedule + (plan.chunks > 1 ? ` x ${plan.chunks}` : ""));
  parts.push(`${plan.microbatches} micro-batch${plan.microbatches > 1 ? "es" : ""} of ${plan.sequences}`);
  if (plan.recompute !== "none") parts.push(`recompute ${plan.recompute}`);
  return parts.join(", ");
}
const usual = (key, plan) => key === "chunks" ? (plan.schedule in CHUNKS ? plan.chunks || CHUNKS[plan.schedule] : 1) : plan[key] ?? FIELD[key].value;
const isShown = (plan) => FIXED.every((key) => String(usual(key, plan)) === String(usual(key, state)));

function takePlan(plan) {
  for (const key of FIXED) state[key] = key === "zero" ? String(plan.zero) : usual(key, plan);
  changed();
}

function markShown() {
  for (const row of document.querySelectorAll("#ranking tbody tr")) {
    if (isShown(row.plan)) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

function showRanking(events) {
  const all = events.filter((e) => e.event === "plan"), fitting = all.filter((p) => p.fits), large = all.filter((p) => !p.fits);
  const plans = [...fitting, ...large.slice(0, fitting.length ? 3 : 10)], recommended = events.find((e) => e.event === "recommendation");
  const body = document.querySelector("#ranking tbody");
  body.replaceChildren(...plans.map((p) => {
    const choose = node("button", { type: "button", textContent: planWords(p.plan) });
    choose.setAttribute("aria-label", `Show the plan ${planWords(p.plan)}`);
    const row = node("tr", { plan: p.plan, className: p.fits ? "" : "over" }, node("td", {}, choose),
      node("td", { className: "n", textContent: seconds(p.step_s) }), node("td", { className: "n", textContent: bytes(p.memory.peak) }),
      node("td", { className: "n", textContent: percent(p.mfu) }));
    if (!p.fits) row.firstChild.append(node("div", { textContent: `does not fit: ${bytes(p.over.bytes)} too much, mostly ${nameOf(p.over.largest)}` }));
    row.addEventListener("click", () => takePlan(p.plan));
    return row;
  }));
  document.querySelector("#ranking table").hidden = plans.length === 0;
  byId("ranking-line").textContent = fitting.length ? `Of all ways to divide ${state.ranks} ranks, the fastest that fit. Choose one to see it.`
    : "No plan fits. Nearest to fitting:";
  showAdvice(recommended);
  markShown();
}

function showAdvice(r) {
  const advice = byId("advice");
  advice.replaceChildren();
  if (!r) return;
  const list = (title, lines) => lines.length &&
    advice.append(node("h3", { textContent: title }), node("ul", {}, ...lines.map((text) => node("li", { textContent: text }))));
  list("Why the first", r.why);
  list("Why not another", r.why_not.map((x) => `${planWords(x.plan)}: ${x.because}`));
  if (r.weakest_assumption) list("What would turn it", [r.weakest_assumption]);
  if (r.command) advice.append(node("h3", { textContent: "The command" }), node("code", { textContent: r.command }));
}
