// The four pictures of a prediction.
const CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "communication", "workspace"];
const CATEGORY_NAMES = { optimizer: "optimizer's state", communication: "buffers of communication" };
const nameOf = (category) => CATEGORY_NAMES[category] || category;

function drawMemory(p) {
  const stages = p.memory_of_stages, peak = Math.max(...stages.map((m) => m.peak)), limit = p.memory_bytes;
  const fullest = stages.findIndex((m) => m.peak === peak);
  const held = CATEGORIES.filter((c) => stages.some((m) => m[c] > 0));
  const sentence = (stages.length > 1 ? "Each bar is what a rank of one pipeline rank holds at its fullest moment" :
    "The bar is what a rank holds at its fullest moment") + "; the broken line is what its card has. " +
    `The fullest${stages.length > 1 ? ` is pipeline rank ${fullest}` : ""}: ` +
    held.map((c) => `${nameOf(c)} ${bytes(stages[fullest][c])}`).join(", ") + ".";
  show("memory", sentence, (svg, width) => {
    const left = 56, right = width - 70, most = 1.04 * Math.max(limit, peak);
    const tall = Math.max(9, Math.min(30, 300 / stages.length)), at = (b) => left + (b / most) * (right - left);
    const top = drawLegend(svg, held.map((c) => [c, nameOf(c)]), width) + 20, end = top + tall * stages.length;
    drawAxis(svg, { left, right, top, y: end + 4, most, unit: bytes });
    stages.forEach((m, i) => {
      const y = top + i * tall;
      let from = 0;
      for (const c of held) {
        const wide = at(from + m[c]) - at(from);
        svg.append(box(at(from), y + 1, wide, tall - 3, c + " box", `pipeline rank ${i}: ${nameOf(c)} ${bytes(m[c])}`));
        from += m[c];
      }
      if (tall < 12 && i % Math.ceil(14 / tall)) return;
      svg.append(words(left - 8, y + tall / 2 + 3, "pp " + i, "soft end"));
      svg.append(words(at(m.peak) + 6, y + tall / 2 + 3, bytes(m.peak), m.peak > limit ? "bad" : ""));
    });
    svg.append(line(at(limit), top - 4, at(limit), end + 4, "halo"));
    svg.append(line(at(limit), top - 4, at(limit), end + 4, "limit"));
    svg.append(words(at(limit), top - 8, `the card: ${bytes(limit)}`, "bad end"));
    return end + 26;
  });
}

const PASSES = { F: "forward", B: "backward", I: "backward: gradients of inputs", W: "backward: gradients of weights" };
function drawPipeline(p) {
  const { actions, shown_s, makespan_s, bubble, chunks } = p.pipeline;
  const kinds = Object.keys(PASSES).filter((k) => actions.some((row) => row.some((a) => a[0] === k)));
  const whole = shown_s >= makespan_s * 0.999;
  const sentence = "Each row is a pipeline rank and time goes to the right; a box is a pass of one micro-batch, with its number" +
    (chunks > 1 ? ", fainter for a rank's later stages" : "") +
    (actions.length > 1 ? `; empty space is waiting time: ${percent(bubble)} of the pipeline's time.` : "; one rank never waits for another.") +
    (whole ? "" : ` The picture shows the first ${seconds(shown_s)} of ${seconds(makespan_s)}.`);
  show("pipeline", sentence, (svg, width) => {
    const left = 56, right = width - 4, at = (t) => left + (t / 1e6) * (right - left);
    const tall = Math.max(8, Math.min(34, 380 / actions.length));
    const top = drawLegend(svg, [...kinds.map((k) => [k, `${k} ${PASSES[k]}`]), ["idle", "waiting"]], width) + 4;
    const end = top + tall * actions.length;
    actions.forEach((row, i) => {
      const y = top + i * tall;
      svg.append(box(left, y + 1, right - left, tall - 2, "idle"));
      for (const [what, stage, microbatch, from, to] of row) {
        const wide = at(to) - at(from), chunk = Math.floor(stage / actions.length);
        const tip = `${PASSES[what]}, stage ${stage}, micro-batch ${microbatch}: ${seconds(((to - from) / 1e6) * shown_s)}`;
        svg.append(box(at(from), y + 1, wide, tall - 2, `${what} ${wide > 3 ? "box" : ""} ${chunk ? "later" : ""}`, tip));
        if (wide > 4 + 7 * String(microbatch).length && tall > 12)
          svg.append(words(at(from) + wide / 2, y + tall / 2 + 4, String(microbatch), "on"));
      }
      if (tall > 11 || i % Math.ceil(14 / tall) === 0) svg.append(words(left - 8, y + tall / 2 + 4, "pp " + i, "soft end"));
    });
    drawAxis(svg, { left, right, top: end, y: end + 4, most: shown_s, unit: seconds });
    return end + 26;
  });
}

// Bars under each other, each with a name, a value and a colour.
function drawBars(svg, width, rows) {
  const left = 128, right = width - 118, tall = 24, most = Math.max(...rows.map((r) => r.value), 1e-300);
  rows.forEach(({ name, value, css, note }, i) => {
    const y = i * tall, wide = Math.max((value / most) * (right - left), value > 0 ? 1 : 0);
    svg.append(words(left - 8, y + 16, name, "soft end"), box(left, y + 3, wide, tall - 7, css, `${name}: ${note}`));
    svg.append(words(left + wide + 6, y + 16, note));
  });
  return tall * rows.length + 4;
}

const PARTS = [["compute", "products", "compute"], ["recompute", "made again", "compute"], ["optimizer", "update", "compute"],
  ["bubble", "bubble", "waiting"], ["tp", "tp exposed", "sending"], ["cp", "cp exposed", "sending"],
  ["ep", "ep exposed", "sending"], ["dp", "dp exposed", "sending"]];
function drawTime(p) {
  const rows = PARTS.filter(([key]) => p.parts[key] > 0).map(([key, name, css]) =>
    ({ name, css, value: p.parts[key], note: `${seconds(p.parts[key])}, ${percent(p.parts[key] / p.step_s)}` }));
  show("time", "Where the slowest rank's step goes: blue computes, grey waits for the pipeline, purple waits for what other ranks send, " +
    "as far as nothing is computed meanwhile.", (svg, width) => drawBars(svg, width, rows));
}

function drawBytes(p) {
  const rows = Object.entries(p.bytes).flatMap(([axis, operations]) => Object.entries(operations)
    .filter(([, value]) => value > 0)
    .map(([operation, value]) => ({ name: `${axis} ${operation.replace(/_/g, "-")}`, css: "sending", value, note: bytes(value) })));
  const sentence = rows.length ? "What one rank sends in a step, by the axis of ranks and the operation; the picture of time says how much of it is waited for."
    : "One rank alone sends nothing.";
  show("bytes", sentence, (svg, width) => drawBars(svg, width, rows));
}
