// Numbers as words.
const three = (x) => x >= 99.95 ? x.toFixed(0) : x >= 9.995 ? x.toFixed(1) : x.toFixed(2);
function scaled(x, units) {
  if (!(Math.abs(x) > 0)) return "0";
  const [size, name] = units.find(([least]) => Math.abs(x) >= 0.9995 * least) || units[units.length - 1];
  return three(x / size) + " " + name;
}
const seconds = (x) => scaled(x, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
const bytes = (x) => scaled(x, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"], [1, "B"]]);
const count = (x) => scaled(x, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"], [1, ""]]).trim();
const percent = (x) => (100 * x).toFixed(Math.abs(x) < 0.0995 ? 1 : 0) + "%";
// Round numbers from 0 to `most`, about `wanted` of them.
function ticks(most, wanted) {
  const raw = most / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}
