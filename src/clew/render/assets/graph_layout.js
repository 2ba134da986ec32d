// Where the boxes stand: the same steps as clew.views.graph_place and graph_layout, taken again whenever a
// reader opens or closes a box. Rows, orders and blocks come with the page; only sizes change here.

function solveColumns(plan, extents, metrics) {
  const left = (node) => (node < plan.real ? extents[node].left : metrics.waypoint);
  const right = (node) => (node < plan.real ? extents[node].right : metrics.waypoint);
  const rightOf = new Map(), leftOf = new Map(), pull = new Map();
  for (const block of plan.blocks) {
    rightOf.set(block, new Map());
    leftOf.set(block, new Map());
    pull.set(block, []);
  }
  for (const row of plan.rows) {
    for (let i = 1; i < row.length; i++) {
      const [a, b] = [row[i - 1], row[i]];
      const gap = a < plan.real && b < plan.real ? metrics.gap : metrics.narrowGap;
      const distance = right(a) + gap + left(b);
      const [u, v] = [plan.blocks[a], plan.blocks[b]];
      rightOf.get(u).set(v, Math.max(distance, rightOf.get(u).get(v) ?? 0));
      leftOf.get(v).set(u, Math.max(distance, leftOf.get(v).get(u) ?? 0));
    }
  }
  for (const [upper, lower] of plan.links) {
    const [a, b] = [plan.blocks[upper], plan.blocks[lower]];
    if (a !== b) {
      pull.get(a).push(b);
      pull.get(b).push(a);
    }
  }
  const axis = relax(sortBlocks(plan.blocks, leftOf, rightOf), leftOf, rightOf, pull, metrics.rounds);
  return plan.blocks.map((block) => axis.get(block));
}

function sortBlocks(blocks, leftOf, rightOf) {
  const waiting = new Map([...new Set(blocks)].map((block) => [block, leftOf.get(block).size]));
  const ready = [...waiting].filter(([, count]) => count === 0).map(([block]) => block);
  const order = [];
  while (ready.length) {
    const block = ready.pop();
    order.push(block);
    for (const other of rightOf.get(block).keys()) {
      waiting.set(other, waiting.get(other) - 1);
      if (waiting.get(other) === 0) ready.push(other);
    }
  }
  return order;
}

function relax(order, leftOf, rightOf, pull, rounds) {
  const axis = new Map();
  const low = (block, start) => {
    let bound = start;
    for (const [other, gap] of leftOf.get(block)) bound = Math.max(bound, axis.get(other) + gap);
    return bound;
  };
  const high = (block) => {
    let bound = Infinity;
    for (const [other, gap] of rightOf.get(block)) bound = Math.min(bound, axis.get(other) - gap);
    return bound;
  };
  for (const block of order) axis.set(block, leftOf.get(block).size ? low(block, -Infinity) : 0);
  for (let round = 0; round < rounds; round++) {
    let moved = 0;
    for (const block of round % 2 === 0 ? [...order].reverse() : order) {
      const others = pull.get(block);
      if (!others.length) continue;
      let sum = 0;
      for (const other of others) sum += axis.get(other);
      const next = Math.min(Math.max(sum / others.length, low(block, -Infinity)), high(block));
      moved = Math.max(moved, Math.abs(next - axis.get(block)));
      axis.set(block, next);
    }
    if (moved < 0.5) break;
  }
  return axis;
}

// Returns an open group: size, axis, boxes and wires, relative to its top left corner.
function openGroup(model, index, opened) {
  const group = model.boxes[index], plan = model.plans[group.plan], metrics = model.metrics;
  const count = group.children.length, isRoot = index === 0;
  const insides = new Map();
  group.children.forEach((child, i) => {
    if (model.boxes[child].children && opened.has(child)) insides.set(i, openGroup(model, child, opened));
  });
  const cards = group.children.map((child) => model.boxes[child]);
  const extents = [];
  for (let node = 0; node < plan.real; node++) {
    extents.push(sizeOf(node, insides, cards, count, group.ins.length, metrics));
  }
  const axes = solveColumns(plan, extents, metrics);
  const rows = stackRows(plan, extents, group, isRoot, metrics);
  const result = { index, boxes: [], wires: [], ins: new Map(), outs: new Map(), height: rows.height };
  setBorders(result, group, extents, axes, isRoot, metrics);
  cards.forEach((card, i) => {
    const y = (rows.tops[rows.of[i]] + rows.bottoms[rows.of[i]] - extents[i].height) / 2;
    result.boxes.push({ index: group.children[i], x: axes[i], y, inside: insides.get(i) });
  });
  addWires(result, { group, plan, insides, cards, extents, axes, rows });
  return result;
}

function sizeOf(node, insides, cards, count, ins, metrics) {
  if (insides.has(node)) {
    const inside = insides.get(node);
    return { left: inside.axis, right: inside.width - inside.axis, height: inside.height };
  }
  if (node < count) return { left: cards[node].left, right: cards[node].right, height: cards[node].height };
  return { left: metrics.port, right: metrics.port, height: node < count + ins ? metrics.header : 0 };
}

function stackRows(plan, extents, group, isRoot, metrics) {
  const tops = [], bottoms = [], of = [];
  let y = group.ins.length || isRoot ? 0 : metrics.header + metrics.belowHeader;
  plan.rows.forEach((row, i) => {
    let height = 0;
    for (const node of row) {
      of[node] = i;
      if (node < plan.real) height = Math.max(height, extents[node].height);
    }
    tops.push(y);
    bottoms.push(y + height);
    y += height + (i === 0 && group.ins.length ? metrics.belowHeader : metrics.rowGap);
  });
  const bottom = bottoms.length ? bottoms[bottoms.length - 1] : y;
  return { tops, bottoms, of, height: group.outs.length || isRoot ? bottom : bottom + metrics.side };
}

function setBorders(result, group, extents, axes, isRoot, metrics) {
  const count = group.children.length;
  let low = Math.min(...axes), high = Math.max(...axes);
  for (let i = 0; i < count; i++) {
    low = Math.min(low, axes[i] - extents[i].left);
    high = Math.max(high, axes[i] + extents[i].right);
  }
  const main = group.ins.length ? axes[count] : (low + high) / 2;
  const side = isRoot ? 0 : metrics.side;
  const left = Math.max(main - low + side, isRoot ? 0 : group.titleWidth);
  const right = Math.max(high - main + side, isRoot ? 0 : group.subtitleWidth);
  for (let i = 0; i < axes.length; i++) axes[i] += left - main;
  result.axis = left;
  result.width = left + right;
  group.ins.forEach((tensor, i) => result.ins.set(tensor, axes[count + i]));
  group.outs.forEach((tensor, i) => result.outs.set(tensor, axes[count + group.ins.length + i]));
}

function addWires(result, parts) {
  const { group, plan, insides, cards, extents, axes, rows } = parts;
  const count = group.children.length, wires = new Map();
  const leave = (node, tensor) => {
    const top = rows.tops[rows.of[node]], bottom = rows.bottoms[rows.of[node]];
    if (insides.has(node)) {
      const inside = insides.get(node);
      const x = axes[node] - inside.axis + (inside.outs.get(tensor) ?? inside.axis);
      return [[x, (top + bottom + inside.height) / 2], [x, bottom]];
    }
    if (node >= count) return [[axes[node], top], [axes[node], bottom]];
    const start = (top + bottom - extents[node].height) / 2 + cards[node].body;
    return [[axes[node], start], [axes[node], bottom]];
  };
  const arrive = (node, tensor) => {
    const top = rows.tops[rows.of[node]], bottom = rows.bottoms[rows.of[node]];
    if (insides.has(node)) {
      const inside = insides.get(node);
      const x = axes[node] - inside.axis + (inside.ins.get(tensor) ?? inside.axis);
      return [[x, top], [x, (top + bottom - inside.height) / 2]];
    }
    if (node >= count) return [[axes[node], top]];
    return [[axes[node], top], [axes[node], (top + bottom - extents[node].height) / 2]];
  };
  for (const [source, target, tensors] of group.edges) {
    const stops = [source, ...(plan.chains[`${source},${target}`] ?? []), target];
    for (const tensor of tensors) {
      for (let i = 1; i < stops.length; i++) {
        const points = [...leave(stops[i - 1], tensor), ...arrive(stops[i], tensor)];
        const key = points.join(" ");
        const isArrow = stops[i] < count && !insides.has(stops[i]);
        if (!wires.has(key)) wires.set(key, { points, isArrow, tensors: new Set() });
        wires.get(key).tensors.add(tensor);
      }
    }
  }
  result.wires = [...wires.values()];
}
