// The map of the prefix cache: a plane with all boxes, and the window through which some are seen.
// Only those have elements; the others are added when they are scrolled to.
Watch.words({
  "cache.split": ["split", "拆分"],
  "cache.hit": ["matched", "命中"],
});

const {h} = Watch;
const HEIGHT = 42; // of a lane, px: a number, and the text below it
const [GAP, LOW_GAP] = [10, 4]; // between two columns, for the lines
const [DIGIT, BESIDE, MARK] = [8, 48, 20]; // px: of a name; beside it, of users and of a mark
const MARKS = { // of a box: its sign, its word
  gone: ["×", "pool.was.evicted"], split: ["‖", "cache.split"], new: ["+", "pool.was.published"],
  hit: ["", "cache.hit"], none: ["", ""],
};
const WIDTH = {hash: 78, radix: 52}; // of a column, px: one block
// Columns are smaller where that makes all of them fit, down to what a number needs. Below SMALL
// of they have no room for the text, and lanes are as low as a number.
const [LEAST, SMALL, LOW] = [24, 0.7, 22];
const fit = (size, num, most) =>
  size < num * LEAST ? most : Math.min(most, Math.floor(size / Math.max(1, num)));

Watch.CacheMap = class {
  constructor(view) {
    this.view = view;
    this.most = WIDTH[view.film.run.prefix_cache] ?? WIDTH.hash;
    [this.width, this.height] = [this.most, HEIGHT];
    this.boxes = [];
    this.lit = new Set(); // blocks
    this.shown = new Map(); // key of a box -> its element
    this.plane = h("div", {class: "cache-plane", role: "presentation"});
    const attributes = {class: "cache-scroll", role: "listbox", tabindex: 0, label: "cache.boxes"};
    this.root = h("div", attributes, this.plane);
    // A window that shrinks scrolls, too, before it is drawn: its boxes are those of another step.
    this.root.addEventListener("scroll", () => this.step === this.view.step && this.paint());
    Watch.letPoint(this.root, view, (event) => this.blockAt(event), (key) => this.next(key));
  }

  // -- pointer and keys

  blockAt(event) {
    const element = event.target.closest?.(".cache-box");
    if (!element || element.classList.contains("is-gone")) return null;
    const {blocks} = element.box;
    const at = Math.floor((event.clientX - element.getBoundingClientRect().left) / this.width);
    return blocks[Math.min(Math.max(at, 0), blocks.length - 1)];
  }

  boxOf(block) {
    return this.boxes.find((box) => !box.isGone && box.blocks.includes(block)) ?? null;
  }

  next(key) {
    if (!key.startsWith("Arrow")) return undefined;
    const at = this.boxOf(Watch.store.block);
    const living = this.boxes.filter((box) => !box.isGone);
    const box = at === null ? living[0] : this.neighbour(living, at, key);
    return box ? box.blocks[0] : Watch.store.block; // its end: the page does not step
  }

  neighbour(living, at, key) {
    const {cached} = this.view.state;
    const {parent} = cached[at.blocks[0]];
    const last = at.blocks.at(-1);
    if (key === "ArrowLeft") return living.find((box) => box.blocks.includes(parent));
    if (key === "ArrowRight") return living.find((box) => cached[box.blocks[0]].parent === last);
    const sign = key === "ArrowUp" ? -1 : 1;
    const far = (box) => Math.abs(box.lane - at.lane) * 1000 + Math.abs(box.column - at.column);
    return living.filter((box) => (box.lane - at.lane) * sign > 0)
      .sort((a, b) => far(a) - far(b))[0];
  }

  // -- the window

  // Asked once a drawing: the browser lays out the page to answer.
  lookThrough() {
    const {scrollLeft: left, scrollTop: top, clientWidth, clientHeight} = this.root;
    this.window = {left, top, right: left + clientWidth, bottom: top + clientHeight};
  }

  isVisible({lane, column, blocks}) {
    const {left, top, right, bottom} = this.window;
    const {width, height} = this;
    const [x, y] = [column * width, lane * height];
    return x < right && x + blocks.length * width > left && y < bottom && y + height > top;
  }

  // Its line passes through what can be seen.
  isCrossing({lane, parent, column, blocks}) {
    if (parent === null) return false;
    return [parent.lane, lane].some((one) =>
      this.isVisible({lane: one, column: column - 1, blocks}));
  }

  // Scrolls as little as possible, so that the box can be seen; of a long one, its beginning.
  reveal(box) {
    const {root, width, height} = this;
    const into = (at, size, from, room) =>
      Math.max(at + Math.min(size, room) - room, Math.min(from, at));
    root.scrollLeft = into(box.column * width, box.blocks.length * width, root.scrollLeft,
      root.clientWidth);
    root.scrollTop = into(box.lane * height, height, root.scrollTop, root.clientHeight);
    this.lookThrough();
  }

  // What happens in a step should be seen: the end of a match, or else any of what was done to the
  // cache. Nothing moves if it is in sight.
  follow() {
    const deepest = (boxes) => boxes.reduce((a, b) => (b.column > a.column ? b : a));
    const matched = this.boxes.filter((box) => box.matched.length);
    const marked = this.boxes.filter((box) => box.isGone || box.numNew || box.isSplit);
    const target = matched.length ? deepest(matched)
      : marked.some((box) => this.isVisible(box)) ? undefined : marked.at(-1);
    if (target !== undefined && !this.isVisible(target)) this.reveal(target);
  }

  // -- drawing

  // The step's boxes, and the blocks that are lit.
  draw(facts, lit) {
    const {view, plane} = this;
    const {numColumns, lanes} = Watch.cacheLayout(view.film); // all that the film will ever need
    this.width = fit(this.root.clientWidth, numColumns, this.most);
    this.height = this.width < SMALL * this.most ? LOW : HEIGHT;
    plane.style.width = `${numColumns * this.width}px`;
    plane.style.height = `${lanes.length * this.height}px`;
    [this.facts, this.lit] = [facts, lit];
    const isNew = this.step !== view.step || this.film !== view.film;
    const {block} = Watch.store;
    if (isNew) this.boxes = Watch.cacheBoxes(view);
    this.lookThrough();
    if (isNew) this.follow();
    const chosen = this.boxOf(block);
    if (this.chosen !== block && chosen !== null && !this.isVisible(chosen)) this.reveal(chosen);
    [this.film, this.step, this.chosen] = [view.film, view.step, block];
    this.paint();
  }

  paint() {
    this.lookThrough();
    const keys = new Set();
    for (const box of this.boxes) {
      if (!this.isVisible(box) && !this.isCrossing(box)) continue;
      const key = `${box.isGone ? "-" : ""}${box.blocks[0]}`;
      keys.add(key);
      const id = `cache-${this.view.index}-${key}`;
      if (!this.shown.has(key)) this.shown.set(key, addBox(this.plane, id));
      drawBox(this, this.shown.get(key), box);
    }
    for (const [key, element] of this.shown) {
      if (keys.has(key)) continue;
      element.line.remove();
      element.remove();
      this.shown.delete(key);
    }
    const active = [...this.shown.values()].find((element) => element.ariaSelected === "true");
    this.root.setAttribute("aria-activedescendant", active?.id ?? "");
  }
};

// -- one box: a block of a chain, or a node of a radix tree; and its line

const addBox = (plane, id) => {
  const parts = Object.fromEntries(["name", "users", "text", "mark"]
    .map((name) => [name, h("span", {class: `cache-${name}`})]));
  const element = h("div", {class: "cache-box", role: "option", id},
    h("span", {class: "cache-top"}, parts.name, parts.users, parts.mark), parts.text);
  element.parts = parts;
  element.line = h("span", {class: "cache-line", "aria-hidden": "true"});
  plane.append(element.line, element);
  return element;
};

// `scene` has the view, the facts, the width of a column, and what is lit.
const drawBox = (scene, element, box) => {
  const {view, width, height, lit} = scene;
  const isLow = height < HEIGHT;
  const gap = isLow ? LOW_GAP : GAP;
  const {blocks, lane, column} = box;
  const {film: {cacheRefs, run}, state} = view;
  const users = box.isGone ? 0 : (state.refs[blocks[0]] ?? 0) - cacheRefs;
  const flags = {
    gone: box.isGone, match: box.matched.length, new: box.numNew, split: box.isSplit,
    used: users > 0, lit: !box.isGone && blocks.some((block) => lit.has(block)),
    windowed: Boolean(run.windows[box.group]), low: isLow,
  };
  element.box = box;
  element.dataset.blocks = blocks.join(" ");
  element.style.left = `${column * width + gap}px`;
  element.style.top = `${lane * height + (isLow ? 2 : 4)}px`;
  element.style.width = `${blocks.length * width - gap}px`;
  element.style.height = `${height - (isLow ? 4 : 6)}px`;
  const set = Object.keys(flags).filter((flag) => flags[flag]);
  element.className = ["cache-box", ...set.map((flag) => `is-${flag}`)].join(" ");
  element.ariaSelected = !box.isGone && blocks.includes(Watch.store.block) ? "true" : "false";
  const name = Watch.blockRanges(blocks);
  const room = blocks.length * width - gap - name.length * DIGIT;
  element.parts.name.textContent = name;
  const refs = users + cacheRefs;
  element.parts.users.textContent = refs > 1 && room >= BESIDE ? `×${refs}` : "";
  element.parts.mark.textContent = room >= MARK ? markOf(box)[0] : ""; // its edge says it, too
  element.parts.text.textContent = box.isGone ? "" : textOf(view, blocks);
  element.setAttribute("aria-label", nameOf(scene, box));
  drawLine(element.line, box, scene, gap);
};

const markOf = (box) => MARKS[box.isGone ? "gone" : box.isSplit ? "split" : box.numNew ? "new"
  : box.matched.length ? "hit" : "none"];

const textOf = ({film, state}, blocks) => blocks.flatMap((block) => state.cached[block].tokens)
  .map((token) => Watch.pieceOf(film, token)).join("");

function nameOf({view, facts}, box) {
  const what = Watch.t("pool.block", {block: Watch.blockRanges(box.blocks)});
  const about = box.isGone ? "" : Watch.describeBlock(view, facts, box.blocks[0]);
  return Watch.joined(what, about, Watch.t(markOf(box)[1]));
}

// From the parent's box to this one: straight on, or down (up) to another lane.
function drawLine(line, {lane, column, parent}, {width, height, view}, gap) {
  line.hidden = parent === null || (parent.died !== null && parent.died < view.step);
  if (line.hidden) return;
  const middle = (at) => at * height + height / 2;
  const [from, to] = [middle(parent.lane), middle(lane)];
  line.className = `cache-line ${to < from ? "is-up" : from === to ? "is-straight" : ""}`;
  line.style.left = `${column * width + (from === to ? 0 : gap / 2)}px`;
  line.style.width = `${from === to ? gap : gap / 2}px`;
  line.style.top = `${Math.min(from, to)}px`;
  line.style.height = `${Math.max(1, Math.abs(to - from))}px`;
}
