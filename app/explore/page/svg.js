// Small pieces of SVG, and a picture as a file.
function draw(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes))
    made.setAttribute(key, typeof value === "number" ? Math.round(value * 100) / 100 : value);
  made.append(...children);
  return made;
}
const words = (x, y, text, css = "") => draw("text", { x, y, class: css }, text);
const line = (x1, y1, x2, y2, css) => draw("line", { x1, y1, x2, y2, class: css });
function box(x, y, width, height, css, tip) {
  return draw("rect", { x, y, width: Math.max(width, 0), height, class: css }, ...(tip ? [draw("title", {}, tip)] : []));
}

// The named colours of a picture, in as many lines as they need; gives the height that they take.
function drawLegend(svg, entries, width) {
  let x = 0, y = 10;
  for (const [css, name] of entries) {
    const wide = 24 + 6.7 * name.length;
    if (x + wide > width && x > 0) x = 0, y += 19;
    svg.append(box(x, y - 9, 12, 12, css + " box"), words(x + 17, y + 1, name, "soft"));
    x += wide + 10;
  }
  return y + 14;
}

// A numbered axis under a picture; `y` is where the picture ends.
function drawAxis(svg, { left, right, top, y, most, unit }) {
  for (const tick of ticks(most, Math.max(3, (right - left) / 110))) {
    const x = left + (tick / most) * (right - left);
    svg.append(line(x, top, x, y, "grid"), words(x, y + 15, unit(tick), x > right - 24 ? "soft end" : "soft mid"));
  }
}

// Puts a new picture into a figure, under the sentence that says what one sees. `paint` gives its height.
function show(id, sentence, paint) {
  const figure = byId(id), width = Math.max(260, figure.clientWidth - 32);
  const svg = draw("svg", { role: "img", "aria-label": `${figure.querySelector("h2").textContent}. ${sentence}` });
  const height = Math.ceil(paint(svg, width));
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  figure.querySelector("figcaption p").textContent = sentence;
  figure.querySelector("svg")?.remove();
  figure.append(svg);
  if (!figure.querySelector("button")) {
    const save = node("button", { type: "button", textContent: "Save SVG" });
    save.setAttribute("aria-label", `Save the picture "${figure.querySelector("h2").textContent}" as SVG`);
    save.addEventListener("click", () => saveSvg(id));
    figure.append(save);
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
  const ground = draw("rect", { x: -16, y: -16, width: width + 32, height: height + 32, fill: look.getPropertyValue("--card").trim() });
  svg.prepend(draw("style", {}, css), ground);
  return new XMLSerializer().serializeToString(svg);
}
function saveSvg(id) {
  const url = URL.createObjectURL(new Blob([svgText(id)], { type: "image/svg+xml" }));
  const link = node("a", { href: url, download: `tessera-${id}.svg` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
