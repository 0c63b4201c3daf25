// The view as a link: what stands behind the # is the state, and nothing else is kept.
function linkOfState() {
  const words = new URLSearchParams();
  for (const f of FIELDS) if (f.key in state) words.set(f.key, state[f.key]);
  return "#" + words;
}

// What a link says is taken where it can be a value of its control; the rest is named.
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

// What the server is asked of this state.
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
  return words;
}
function searchQuery() {
  const words = modelQuery();
  words.set("ranks", state.ranks);
  words.set("batch", state.batch);
  return words;
}
