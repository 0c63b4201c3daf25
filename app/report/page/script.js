// Shows tooltips and highlights the boxes of the same micro-batch.
"use strict";
const tip = document.getElementById("tip");
let dimmed = [];
function undim() {
  for (const svg of dimmed) {
    svg.classList.remove("dim");
    for (const box of svg.querySelectorAll(".same")) box.classList.remove("same");
  }
  dimmed = [];
}
function dim(microbatch) {
  for (const svg of document.querySelectorAll("#pipeline > svg")) {
    svg.classList.add("dim");
    dimmed.push(svg);
    for (const box of svg.querySelectorAll('[data-mb="' + microbatch + '"]')) box.classList.add("same");
  }
}
document.addEventListener("mousemove", (event) => {
  const words = event.target.dataset ? event.target.dataset.tip : undefined;
  tip.style.display = words ? "block" : "none";
  if (!words) return;
  tip.textContent = words.split(" | ").join("\n");
  const place = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - place.width - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - place.height - 8)) + "px";
});
document.addEventListener("mouseover", (event) => {
  undim();
  if (event.target.dataset && event.target.dataset.mb !== undefined) dim(event.target.dataset.mb);
});
