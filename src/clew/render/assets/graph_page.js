// The page: opening and closing, moving, searching, details. All numbers it shows were worked out before.

const model = JSON.parse(document.getElementById("data").textContent);
const stage = document.getElementById("stage"), world = document.getElementById("world");
const details = document.getElementById("details"), search = document.getElementById("search");
const state = {
  opened: new Set(model.opened), view: { x: 0, y: 0, scale: 1 }, places: new Map(),
  selected: -1, tensors: new Set(), hits: [], hit: -1, size: { width: 0, height: 0 },
};
const MOST_BOXES = 3000;

// ------------------------------------------------------------------ drawing

function redraw() {
  const open = openGroup(model, 0, state.opened);
  const layers = drawWorld(model, open);
  state.places = layers.places;
  state.size = { width: open.width, height: open.height };
  const focused = document.activeElement?.closest?.("[data-box]")?.dataset.box;
  world.innerHTML = [...layers.frames, ...layers.wires, ...layers.boxes, ...layers.labels].join("");
  if (focused !== undefined) world.querySelector(`[data-box="${focused}"]`)?.focus({ preventScroll: true });
  mark();
}

function mark() {
  const found = new Set(state.hits.map((hit) => visibleAncestor(hit.box)));
  for (const element of world.querySelectorAll("[data-box]")) {
    const index = Number(element.dataset.box);
    element.classList.toggle("selected", index === state.selected);
    element.classList.toggle("hit", found.has(index));
  }
  for (const element of world.querySelectorAll("[data-tensors]")) {
    const isLit = element.dataset.tensors.split(",").some((tensor) => state.tensors.has(Number(tensor)));
    element.classList.toggle("lit", isLit && !element.classList.contains("grip"));
  }
}

function visibleAncestor(index) {
  let shown = index;
  for (let at = model.boxes[index].parent; at > 0; at = model.boxes[at].parent) {
    if (!state.opened.has(at)) shown = at;
  }
  return shown;
}

function applyView() {
  const { x, y, scale } = state.view;
  world.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
}

function fit(mostScale = 1) {
  const { width, height } = stage.getBoundingClientRect();
  const scale = Math.min(mostScale, (width - 60) / state.size.width, (height - 60) / state.size.height);
  state.view = { scale, x: (width - state.size.width * scale) / 2, y: (height - state.size.height * scale) / 2 };
  applyView();
}

// The first look: readable, beginning at the top.
function start() {
  const { width, height } = stage.getBoundingClientRect();
  const scale = Math.min(1, (width - 60) / state.size.width);
  const y = state.size.height * scale < height - 60 ? (height - state.size.height * scale) / 2 : 30;
  state.view = { scale, x: (width - state.size.width * scale) / 2, y };
  applyView();
}

function zoom(factor, x, y) {
  const scale = Math.min(4, Math.max(0.02, state.view.scale * factor));
  const ratio = scale / state.view.scale;
  state.view = { scale, x: x - (x - state.view.x) * ratio, y: y - (y - state.view.y) * ratio };
  applyView();
}

function centre(index) {
  const place = state.places.get(index);
  if (!place) return;
  const { width, height } = stage.getBoundingClientRect();
  const scale = Math.max(state.view.scale, 0.7);
  state.view = {
    scale, x: width / 2 - (place.x + place.width / 2) * scale,
    y: Math.max(height / 2 - (place.y + place.height / 2) * scale, 40 - place.y * scale),
  };
  applyView();
}

// ------------------------------------------------------------------ opening and closing

function toggle(index) {
  if (!model.boxes[index].children) return;
  const before = state.places.get(index);
  if (state.opened.has(index)) state.opened.delete(index);
  else state.opened.add(index);
  redraw();
  const after = state.places.get(index);
  // The box stays where the reader clicked it.
  state.view.x += (before.x + before.width / 2 - after.x - after.width / 2) * state.view.scale;
  state.view.y += (before.y - after.y) * state.view.scale;
  applyView();
}

function shownGroups(isOpen) {
  return [...state.places.keys()].filter((i) => model.boxes[i].children && state.opened.has(i) === isOpen);
}

function openLevel() {
  const groups = shownGroups(false);
  const more = groups.reduce((sum, i) => sum + model.boxes[i].children.length, 0);
  if (state.places.size + more > MOST_BOXES) {
    return say(`Opening ${more.toLocaleString("en")} more boxes would make the page slow. Open the modules you need.`);
  }
  groups.forEach((i) => state.opened.add(i));
  redraw();
  start();
}

function closeLevel() {
  const open = shownGroups(true);
  const deepest = Math.max(0, ...open.map((i) => model.boxes[i].level));
  open.filter((i) => model.boxes[i].level === deepest).forEach((i) => state.opened.delete(i));
  redraw();
  start();
}

function reveal(index) {
  for (let at = model.boxes[index].parent; at > 0; at = model.boxes[at].parent) state.opened.add(at);
  redraw();
  select(index);
  centre(index);
}

// ------------------------------------------------------------------ details

function row(name, value) {
  return `<tr><td>${escapeText(name)}</td><td>${escapeText(value)}</td></tr>`;
}

function describeTensor(index) {
  const tensor = model.tensors[index];
  const grad = tensor.grad ? " · needs grad" : "";
  let text = `<p>${escapeText(tensor.name)}<br><span class="quiet">${escapeText(`${tensor.role} · ${tensor.shape} · ${tensor.dtype}${grad}`)}</span></p>`;
  for (const [title, rows] of [["", tensor.stats], ["gradient", tensor.gradStats]]) {
    if (rows) text += `${title ? `<p class="quiet">${title}</p>` : ""}<dl>${rows.map(([n, v]) => `<div><dt>${escapeText(n)}</dt><dd>${escapeText(v)}</dd></div>`).join("")}</dl>`;
  }
  return text;
}

function describeBox(index) {
  const box = model.boxes[index];
  let text = `<h2>${escapeText(box.title)}</h2><p class="quiet">${escapeText(box.subtitle)}</p><table>`;
  for (const [name, value] of box.facts) text += row(name, value);
  text += "</table>";
  if (box.op === undefined) return text + (box.tensor === undefined ? "" : describeTensor(box.tensor));
  const op = model.ops[box.op];
  if (op.code) text += `<pre>${escapeText(op.code)}</pre>`;
  if (op.args.length) text += `<h3>Arguments</h3><table>${op.args.map(([n, v]) => row(n, v)).join("")}</table>`;
  text += `<h3>Inputs</h3>${op.inputs.map(describeTensor).join("") || '<p class="quiet">none</p>'}`;
  return `${text}<h3>Outputs</h3>${op.outputs.map(describeTensor).join("") || '<p class="quiet">none</p>'}`;
}

function describeStart() {
  const notes = model.notes.map((note) => `<p>${escapeText(note)}</p>`).join("");
  return (
    `<h2>${escapeText(model.title)}</h2><p class="quiet">${escapeText(model.summary)}</p>${notes}` +
    "<h3>How to read it</h3><p>Click a module to open it and its header to close it, an operation or a line for its details.</p>" +
    "<table><tr><td><kbd>/</kbd></td><td>search; <kbd>Enter</kbd> for the next</td></tr>" +
    "<tr><td><kbd>Tab</kbd></td><td>next box; <kbd>Enter</kbd> opens it</td></tr>" +
    "<tr><td><kbd>e</kbd> <kbd>c</kbd></td><td>open, close a level</td></tr>" +
    "<tr><td><kbd>+</kbd> <kbd>-</kbd></td><td>zoom; arrows move</td></tr>" +
    "<tr><td><kbd>f</kbd></td><td>fit to the window</td></tr>" +
    "<tr><td><kbd>d</kbd></td><td>light or dark</td></tr>" +
    "<tr><td><kbd>Esc</kbd></td><td>let go</td></tr></table>"
  );
}

function say(text) {
  details.innerHTML = `<p>${escapeText(text)}</p>`;
}

function select(index) {
  const box = model.boxes[index];
  state.selected = index;
  const op = model.ops[box?.op];
  state.tensors = new Set(op ? [...op.inputs, ...op.outputs] : box?.ins ? [...box.ins, ...box.outs] : box?.tensor === undefined ? [] : [box.tensor]);
  details.innerHTML = index > 0 ? describeBox(index) : describeStart();
  details.scrollTop = 0;
  mark();
}

function selectTensors(tensors) {
  state.selected = -1;
  state.tensors = new Set(tensors);
  details.innerHTML = `<h2>${tensors.length === 1 ? "Tensor" : `${tensors.length} tensors`}</h2>${tensors.map(describeTensor).join("")}`;
  mark();
}

// ------------------------------------------------------------------ search

function find(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return [];
  const hits = [];
  model.boxes.forEach((box, index) => {
    if (index && wanted.every((word) => box.words.includes(word))) hits.push({ box: index });
  });
  return hits;
}

function showHits() {
  state.hits = find(search.value);
  state.hit = -1;
  const count = state.hits.length;
  document.getElementById("count").textContent = search.value.trim() ? `${count.toLocaleString("en")} found` : "";
  const buttons = state.hits.slice(0, 60).map(({ box }) => {
    const data = model.boxes[box];
    const where = data.facts.find(([name]) => name === "module")?.[1] ?? "";
    return `<button class="hit" data-hit="${box}">${escapeText(data.title)} <small>${escapeText(`${data.subtitle} ${where}`)}</small></button>`;
  });
  const rest = count > 60 ? `<p class="quiet">and ${(count - 60).toLocaleString("en")} more</p>` : "";
  details.innerHTML = search.value.trim() ? buttons.join("") + rest || '<p class="quiet">nothing found</p>' : describeStart();
  mark();
}

function nextHit(step) {
  if (!state.hits.length) return;
  state.hit = (state.hit + step + state.hits.length) % state.hits.length;
  document.getElementById("count").textContent = `${state.hit + 1} of ${state.hits.length}`;
  reveal(state.hits[state.hit].box);
}

// ------------------------------------------------------------------ hands

const pointers = new Map();
let travelled = 0;

stage.addEventListener("pointerdown", (event) => {
  pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  if (pointers.size === 1) travelled = 0;
});

window.addEventListener("pointermove", (event) => {
  const last = pointers.get(event.pointerId);
  if (!last) return;
  const before = [...pointers.values()].map((p) => ({ ...p }));
  travelled += Math.hypot(event.clientX - last.x, event.clientY - last.y);
  Object.assign(last, { x: event.clientX, y: event.clientY });
  if (pointers.size === 2) return pinch(before, [...pointers.values()]);
  if (travelled < 4) return;
  stage.classList.add("moving");
  state.view.x += event.clientX - before[0].x;
  state.view.y += event.clientY - before[0].y;
  applyView();
});

function pinch(before, after) {
  const span = ([a, b]) => Math.hypot(a.x - b.x, a.y - b.y) || 1;
  const bounds = stage.getBoundingClientRect();
  const x = (after[0].x + after[1].x) / 2 - bounds.left, y = (after[0].y + after[1].y) / 2 - bounds.top;
  zoom(span(after) / span(before), x, y);
}

for (const name of ["pointerup", "pointercancel"]) {
  window.addEventListener(name, (event) => {
    pointers.delete(event.pointerId);
    stage.classList.remove("moving");
  });
}

stage.addEventListener("click", (event) => {
  if (travelled >= 4) return;
  const box = event.target.closest("[data-box]"), wire = event.target.closest("[data-tensors]");
  if (wire) selectTensors(wire.dataset.tensors.split(",").map(Number));
  else if (box && isInside(event, Number(box.dataset.box))) select(Number(box.dataset.box));
  else if (box) press(Number(box.dataset.box));
  else select(-1);
});

// Whether a click fell below the header of an open module, where it must not close by accident.
function isInside(event, index) {
  if (!state.opened.has(index)) return false;
  const y = (event.clientY - stage.getBoundingClientRect().top - state.view.y) / state.view.scale;
  return y > state.places.get(index).y + model.metrics.header;
}

function press(index) {
  select(index);
  toggle(index);
}

stage.addEventListener("wheel", (event) => {
  event.preventDefault();
  const bounds = stage.getBoundingClientRect();
  const lines = event.deltaMode === 1 ? 16 : 1;
  zoom(Math.exp(-event.deltaY * lines * 0.0015), event.clientX - bounds.left, event.clientY - bounds.top);
}, { passive: false });

details.addEventListener("click", (event) => {
  const hit = event.target.closest("[data-hit]");
  if (hit) reveal(Number(hit.dataset.hit));
});

search.addEventListener("input", showHits);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") nextHit(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") {
    search.value = "";
    showHits();
    search.blur();
  }
  event.stopPropagation();
});

const MOVES = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const bounds = stage.getBoundingClientRect();
  const box = event.target.closest?.("[data-box]");
  if ((event.key === "Enter" || event.key === " ") && box) press(Number(box.dataset.box));
  else if (event.key === "/") search.focus();
  else if (event.key === "Escape") select(-1);
  else if (event.key === "e") openLevel();
  else if (event.key === "c") closeLevel();
  else if (event.key === "f" || event.key === "0") fit();
  else if (event.key === "d") switchTheme();
  else if (event.key === "+" || event.key === "=") zoom(1.25, bounds.width / 2, bounds.height / 2);
  else if (event.key === "-") zoom(0.8, bounds.width / 2, bounds.height / 2);
  else if (MOVES[event.key]) {
    state.view.x += MOVES[event.key][0];
    state.view.y += MOVES[event.key][1];
    applyView();
  } else return;
  event.preventDefault();
});

// ------------------------------------------------------------------ colours and the start

function switchTheme(dark = document.documentElement.dataset.theme !== "dark") {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").textContent = dark ? "Light" : "Dark";
}

document.getElementById("less").addEventListener("click", closeLevel);
document.getElementById("more").addEventListener("click", openLevel);
document.getElementById("fit").addEventListener("click", () => fit());
document.getElementById("theme").addEventListener("click", () => switchTheme());
document.querySelector("h1").textContent = model.title;
document.querySelector(".name p").textContent = model.summary;
document.getElementById("legend").innerHTML = model.legend.map(([fill, stroke, thickness, isDashed, text]) =>
  `<li><i style="background:${fill};border-color:${stroke};border-width:${thickness}px;` +
  `border-style:${isDashed ? "dashed" : "solid"}"></i>${escapeText(text)}</li>`).join("");
switchTheme(window.matchMedia("(prefers-color-scheme: dark)").matches);
redraw();
start();
select(-1);
