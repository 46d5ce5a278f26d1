// The map of the prefix cache: a plane with all boxes, and the window through which some are seen.
// Only those have elements; the others are added when they are scrolled to.
const {h} = Watch;
const HEIGHT = Watch.CACHE_LANE;
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
    this.root = h("div", {class: "cache-scroll", role: "listbox", tabindex: 0}, this.plane);
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
    const {root} = this;
    const [left, top] = [box.column * this.width, box.lane * this.height];
    const right = left + Math.min(box.blocks.length * this.width, root.clientWidth);
    if (left < root.scrollLeft) root.scrollLeft = left;
    else if (right > root.scrollLeft + root.clientWidth)
      root.scrollLeft = right - root.clientWidth;
    if (top < root.scrollTop) root.scrollTop = top;
    else if (top + this.height > root.scrollTop + root.clientHeight)
      root.scrollTop = top + this.height - root.clientHeight;
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
    this.root.setAttribute("aria-label", Watch.t("cache.boxes"));
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
      if (!this.shown.has(key)) this.shown.set(key, Watch.addCacheBox(this.plane, id));
      Watch.drawCacheBox(this, this.shown.get(key), box);
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
