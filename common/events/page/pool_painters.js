// Two ways to draw the cells of the pool: elements while there are few, a canvas when there are
// many. Both are given the same looks, of the cells whose look has changed.
//
//   look = {state, owners: [request, ...], label, refs, order, change, isPublished, isDim, isLit,
//     isCursor}
//   state is "null", "free", "held", "loading" or "idle" (cached, and nobody uses it)
const {h} = Watch;
const MAX_ELEMENTS = 400;
const FLAGS = ["Empty", "Published", "Dim", "Lit", "Cursor"];
const EDGES = {idle: "var(--cached)", null: "var(--ink)", loading: "var(--ink)"};
const [WIDEST, HIGHEST] = [76, 48]; // px
const [LEAST_WIDTH, LEAST_HEIGHT] = [22, 15]; // below, a cell has no text
const WIDE = 40; // from here on there is room for the reference count, too
const ROOMY = 31; // px of height: and for the block's number in a line of its own

// The largest cells that fit: the area is fixed, the cells shrink. A little wider than high, since
// they hold words.
Watch.poolGrid = (width, height, num) => {
  let best = null;
  for (let rows = 1; rows <= num; rows++) {
    const columns = Math.ceil(num / rows);
    const [w, h] = [Math.min(WIDEST, width / columns), Math.min(HIGHEST, height / rows)];
    const score = Math.min(w, 1.3 * h);
    if (best === null || score > best.score) best = {score, w, h, columns, rows};
    if (h < 1.3 * w && score < best.score) break; // more rows only make it worse
  }
  const round = (length) =>
    length >= 3 ? Math.floor(length) : Math.max(1, Math.floor(4 * length) / 4);
  const [w, h] = [round(best.w), round(best.h)];
  return {...best, w, h, num, hasLabels: w >= LEAST_WIDTH && h >= LEAST_HEIGHT};
};

Watch.poolPainter = (host, num) => (num <= MAX_ELEMENTS ? new Elements(host) : new Canvas(host));

class Elements {
  cells = [];

  constructor(host) {
    this.host = host;
  }

  resize(grid) {
    this.host.style.setProperty("--cell-width", `${grid.w}px`);
    this.host.style.setProperty("--cell-height", `${grid.h}px`);
    this.host.style.setProperty("--columns", grid.columns);
    this.host.classList.toggle("pool-tiny", !grid.hasLabels);
    this.host.classList.toggle("pool-narrow", grid.w < WIDE);
    this.host.classList.toggle("pool-roomy", grid.w >= WIDE && grid.h >= ROOMY);
    while (this.cells.length < grid.num) this.add(this.cells.length);
  }

  add(block) {
    const [label, refs, order] = ["label", "refs", "order"].map((name) =>
      h("span", {class: `pool-${name}`}));
    const id = `${this.host.id}-${block}`;
    const attributes = {id, class: "pool-cell", "data-block": block, role: "option"};
    const cell = h("div", attributes, label, refs, order);
    this.cells.push({cell, label, refs, order});
    this.host.append(cell);
  }

  paint(block, look, name) {
    const {cell, label, refs, order} = this.cells[block];
    const flags = FLAGS.filter((flag) => look[`is${flag}`]);
    const classes = [look.state, ...flags].map((name) => `is-${name.toLowerCase()}`);
    if (look.change) classes.push(`was-${look.change}`);
    cell.className = ["pool-cell", ...classes].join(" ");
    cell.style.background = this.fill(look);
    cell.setAttribute("aria-label", name());
    cell.setAttribute("aria-selected", String(look.isCursor));
    label.textContent = look.label;
    refs.textContent = look.refs > 1 ? look.refs : "";
    order.textContent = look.order;
  }

  // Stripes in the colours of all who share it, three at most.
  fill(look) {
    const tint = look.isEmpty ? "12%" : "var(--tint)";
    const colours = look.owners.map((id) =>
      `color-mix(in srgb, ${Watch.colour(id)} ${tint}, var(--paper))`);
    if (colours.length < 2) return colours[0] ?? "";
    const share = 100 / colours.length;
    const stops = colours.map((colour, i) => `${colour} ${i * share}% ${(i + 1) * share}%`);
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }

  point() {} // its cells say it themselves

  at(event) {
    const cell = event.target.closest?.(".pool-cell");
    return cell ? Number(cell.dataset.block) : null;
  }

  active(block) {
    return this.cells[block]?.cell.id ?? "";
  }
}

// Two layers: below what the step made of each block, above what is looked at. Pointing at
// something then repaints a few cells of the upper one, and none of the lower.
class Canvas {
  constructor(host) {
    this.isLayered = true;
    [this.canvas, this.upper] = ["lower", "upper"].map((layer) =>
      h("canvas", {class: `pool-canvas is-${layer}`, "aria-hidden": "true"}));
    // What a screen reader hears of the block under the cursor.
    const id = `${host.id}-spoken`;
    this.spoken = h("div", {id, class: "unseen", role: "option", "aria-selected": "true"});
    host.append(h("div", {class: "pool-layers"}, this.canvas, this.upper), this.spoken);
  }

  resize(grid) {
    this.grid = grid;
    this.pen = Watch.sized(this.canvas, grid.columns * grid.w, grid.rows * grid.h);
  }

  place(block) {
    const {w, h, columns} = this.grid;
    return [(block % columns) * w, Math.floor(block / columns) * h, w, h];
  }

  paint(block, look) {
    const [left, top, wide, high] = this.place(block);
    Watch.fillBox(this.pen, "var(--line)", left, top, wide, high); // what shows between two cells
    const gap = Math.min(wide, high) > 6 ? 1 : 0.5;
    this.paintLook(this.pen, look, [left + gap, top + gap, wide - 2 * gap, high - 2 * gap]);
  }

  // `lit`: of a request that is looked at, its blocks; null if none is.
  point(lit, pointed, cursor, name) {
    const {columns, rows, w, h} = this.grid;
    const pen = Watch.sized(this.upper, columns * w, rows * h);
    if (lit !== null) {
      pen.globalAlpha = 0.65;
      Watch.fillBox(pen, "var(--paper)", 0, 0, columns * w, rows * h);
      pen.globalAlpha = 1;
    }
    for (const block of lit?.keys() ?? [pointed].filter((one) => one !== null)) {
      const place = this.place(block);
      pen.clearRect(...place);
      Watch.strokeBox(pen, "var(--ink)", Math.min(2, w / 3), ...place);
    }
    this.spoken.textContent = cursor === null ? "" : name();
    if (cursor !== null) Watch.strokeBox(pen, "var(--focus)", 3, ...this.place(cursor));
  }

  paintLook(pen, look, [x, y, w, h]) {
    Watch.fillBox(pen, "var(--paper)", x, y, w, h);
    look.owners.forEach((id, i) => {
      const width = w / look.owners.length;
      pen.globalAlpha = look.isEmpty ? 0.2 : 0.6;
      Watch.fillBox(pen, Watch.colour(id), x + i * width, y, width, h);
    });
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
    pen.strokeStyle = Watch.plain(EDGES[look.state] ?? "var(--pool-edge)");
    if (h > 4) pen.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
    if (look.state === "idle") { // a filled corner: cached, and free to be evicted
      Watch.trace(pen, [[x, y + h], [x + w, y + h], [x, y]]);
      pen.fillStyle = Watch.plain("var(--cached)");
      pen.fill();
    }
    if (look.state === "null" || look.state === "loading") {
      Watch.trace(pen, [[x, y + h], [x + w, y]]);
      pen.stroke();
    }
    const line = Math.max(1, h / 5);
    if (look.isPublished) Watch.fillBox(pen, "var(--cached)", x, y + h - line, w, line);
    if (look.change) {
      const isGone = look.change === "freed" || look.change === "evicted";
      pen.setLineDash(isGone ? [2, 1] : []);
      Watch.strokeBox(pen, "var(--ink)", h > 8 ? 2 : 1, x + 0.5, y + 0.5, w - 1, h - 1);
      pen.setLineDash([]);
    }
  }

  at(event) {
    const {w, h, columns, num} = this.grid;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / w);
    const block = Math.floor((event.clientY - box.top) / h) * columns + column;
    return column >= 0 && column < columns && block >= 0 && block < num ? block : null;
  }

  active() {
    return this.spoken.id;
  }
}
