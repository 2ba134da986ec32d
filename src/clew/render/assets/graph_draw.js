// Turns an open group into SVG. Closed boxes come drawn with the page; frames, wires and labels are drawn here.

const FILLS = ["paper", "frame-fill", "frame-fill-2"];

function escapeText(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
}

function round(value) {
  return Math.round(value * 10) / 10;
}

function fillOf(level) {
  return FILLS[level === 0 ? 0 : 2 - (level % 2)];
}

// Returns the four layers of the picture as text: frames, wires, boxes, labels.
function drawWorld(model, open) {
  const layers = { frames: [], wires: [], boxes: [], labels: [], places: new Map() };
  drawGroup(model, open, { x: 0, y: 0, level: 0 }, layers);
  return layers;
}

function drawGroup(model, group, at, layers) {
  for (const wire of group.wires) layers.wires.push(drawWire(wire, at.x, at.y));
  for (const box of group.boxes) {
    const x = at.x + box.x, y = at.y + box.y;
    if (box.inside) drawFrame(model, box, x, y, at.level + 1, layers);
    else drawBox(model, box, x, y, at.level, layers);
  }
}

function drawBox(model, box, x, y, level, layers) {
  const data = model.boxes[box.index];
  layers.places.set(box.index, { x: x - data.left, y, width: data.left + data.right, height: data.body });
  const kind = data.children ? "group" : "op";
  const state = data.children ? ' aria-expanded="false"' : "";
  layers.boxes.push(
    `<g class="box ${kind}" tabindex="0" role="button" data-box="${box.index}"${state} ` +
      `aria-label="${escapeText(`${data.title} ${data.subtitle}`)}" transform="translate(${round(x)} ${round(y)})">` +
      model.cards[data.card] + drawMark(-data.left, 0, data.left + data.right, data.body) + "</g>",
  );
  if (data.label) {
    layers.labels.push(
      `<text class="label" x="${round(x)}" y="${round(y + data.body + 12)}" font-size="${model.metrics.labelSize}" ` +
        `style="stroke:var(--${fillOf(level)})">${escapeText(data.label)}</text>`,
    );
  }
}

function drawFrame(model, box, x, y, level, layers) {
  const data = model.boxes[box.index], inside = box.inside;
  const left = x - inside.axis, fill = fillOf(level);
  layers.places.set(box.index, { x: left, y, width: inside.width, height: inside.height });
  layers.frames.push(
    `<g class="frame" tabindex="0" role="button" data-box="${box.index}" aria-expanded="true" ` +
      `aria-label="${escapeText(`${data.title} ${data.subtitle}`)}" transform="translate(${round(left)} ${round(y)})">` +
      `<rect width="${round(inside.width)}" height="${round(inside.height)}" rx="10" fill="var(--${fill})" ` +
      `stroke="var(--frame)" stroke-width="1.2"/>` + drawMark(0, 0, inside.width, inside.height) + "</g>",
  );
  const halo = `paint-order="stroke" stroke="var(--${fill})" stroke-width="4" stroke-linejoin="round"`;
  const base = round(y + 17.5);
  layers.labels.push(
    `<text x="${round(left + 11)}" y="${base}" font-size="${model.metrics.titleSize}" font-weight="600" ` +
      `fill="var(--ink)" ${halo}>${escapeText(data.title)}</text>`,
    `<text x="${round(left + inside.width - 11)}" y="${base}" font-size="${model.metrics.smallSize}" ` +
      `text-anchor="end" fill="var(--quiet)" ${halo}>${escapeText(data.subtitle)}</text>`,
  );
  drawGroup(model, inside, { x: left, y, level }, layers);
}

function drawMark(x, y, width, height) {
  return (
    `<rect class="mark" x="${round(x - 4)}" y="${round(y - 4)}" width="${round(width + 8)}" ` +
    `height="${round(height + 8)}" rx="10"/>`
  );
}

function drawWire(wire, dx, dy) {
  const points = wire.points.map(([x, y]) => [x + dx, y + dy]);
  const [endX, endY] = points[points.length - 1];
  if (wire.isArrow) points[points.length - 1] = [endX, endY - 6];
  let path = `M${round(points[0][0])} ${round(points[0][1])}`;
  for (let i = 1; i < points.length; i++) {
    const [x0, y0] = points[i - 1], [x1, y1] = points[i];
    const middle = round((y0 + y1) / 2);
    path += x0 === x1 ? `V${round(y1)}` : `C${round(x0)} ${middle} ${round(x1)} ${middle} ${round(x1)} ${round(y1)}`;
  }
  const tensors = [...wire.tensors].join(",");
  const head = wire.isArrow
    ? `<path class="head" data-tensors="${tensors}" d="M${round(endX)} ${round(endY)}l-3.5 -7h7z"/>` : "";
  return `<path class="wire" data-tensors="${tensors}" d="${path}"/><path class="grip" data-tensors="${tensors}" d="${path}"/>${head}`;
}
