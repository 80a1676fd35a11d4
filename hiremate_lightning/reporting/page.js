const known = JSON.parse(document.getElementById("steps").textContent);
const pictures = [...document.querySelectorAll("#timeline svg")], note = document.getElementById("note");
const [picture] = pictures, lines = pictures.map(picture => {
  const line = document.createElementNS(picture.namespaceURI, "path");
  line.setAttribute("class", "peak"); line.setAttribute("stroke", "#22262d"); picture.append(line);
  return line;
});
const columns = picture => picture.viewBox.baseVal.width - known.left - known.right;
let run = known.runs[1], at = 0;
function words(bytes) {
  let unit = 0;
  for (; bytes >= 1024 && unit < 4; unit++) bytes /= 1024;
  const number = unit ? bytes.toFixed(Math.max(0, 2 - Math.floor(Math.log10(bytes)))) : bytes;
  return `${number} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
function show() {
  if (!run.steps.length) return;
  at = Math.max(0, Math.min(at, run.steps.length - 1));
  const [index, again, total, ...sizes] = run.steps[at], [name, direction, module, source, time] = known.nodes[index];
  const held = run.bands.map((band, i) => [band, sizes[i]]).filter(pair => pair[1]);
  if (known.resident) held.unshift(["resident before the step", known.resident]);
  const rows = held.map(([band, bytes]) => `${words(bytes)} ${band}`);
  note.textContent = [`${name}, ${again ? "recomputed" : direction}, ${time}`, module, source,
    `${words(known.resident + total)} in all`, ...rows].filter(Boolean).join("\n");
  note.style.minHeight = `${Math.max(parseFloat(note.style.minHeight) || 0, note.offsetHeight)}px`;
  const share = (run.starts[at] + run.starts[at + 1]) / 2 / known.end;
  pictures.forEach((picture, i) =>
    lines[i].setAttribute("d", `M${known.left + share * columns(picture)} ${run.top}v${known.height}`));
}
function point(event) {
  const picture = event.currentTarget;
  const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
  run = known.runs[place.y < known.runs[1].top - 20 ? 0 : 1];
  const time = (place.x - known.left) / columns(picture) * known.end;
  at = run.starts.findLastIndex(start => start <= time);
  show();
}
function walk(event) {
  const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (step) { at += step; show(); event.preventDefault(); }
}
for (const picture of pictures) {
  for (const kind of ["pointerdown", "pointermove"]) picture.addEventListener(kind, point);
  picture.addEventListener("keydown", walk);
}
