// Draws the cells of the pool: elements, which are given the looks of the cells that changed.
//
//   look = {state, owners: [request, ...], label, refs, order, change, isPublished, isDim, isLit,
//     isCursor}
//   state is "null", "free", "held", "loading" or "idle" (cached, and nobody uses it)
const {h} = Watch;
const FLAGS = ["Empty", "Published", "Dim", "Lit", "Cursor"];
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

Watch.PoolPainter = class {
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

  at(event) {
    const cell = event.target.closest?.(".pool-cell");
    return cell ? Number(cell.dataset.block) : null;
  }

  active(block) {
    return this.cells[block]?.cell.id ?? "";
  }
};
