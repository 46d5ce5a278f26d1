// Scene 1: requests x steps. Rows stand in order of arrival and stay put. A cell is what a request
// computed in a step, or why it waited.
//
// The canvas is as large as what is seen of it: it stays in the corner of a scrolling box, whose
// content is as large as the whole run, and draws the cells that the box shows.
const {store, t, h} = Watch;
const HEAD = Watch.gridHead;
Watch.words({
  "grid.name": ["Requests by steps. Left and right: the step; up and down: the request.",
    "请求与步的网格。左右键换步，上下键换请求。"],
  "grid.by_time": ["columns as wide as their time", "列宽按用时"],
});

const [CELL_MIN, CELL_MAX] = [13, 34]; // width
const TIMED_MIN = 5; // of a column that is as wide as its step took
const [ROW_MIN, ROW_MAX] = [17, 34]; // height

class Grid {
  constructor(root, view) {
    this.view = view;
    this.rows = Watch.requestIds(); // the same in both films of a comparison
    this.seen = {}; // what was drawn last: step and request, to know which of them moved
    this.canvas = h("canvas");
    this.space = h("div", {class: "grid-space"}, this.canvas);
    const attributes = {class: "grid-box", tabindex: 0, role: "application", label: "grid.name"};
    this.box = h("div", attributes, this.space);
    this.tip = h("p", {class: "grid-tip", hidden: true});
    this.spoken = h("p", {class: "unseen", "aria-live": "polite"});
    this.legend = h("p", {class: "grid-legend"});
    const onclick = () => Watch.set({byTime: !store.byTime});
    this.byTime = h("button", {class: "by-time", says: "grid.by_time", onclick});
    root.classList.add("grid-body");
    root.append(this.box, this.legend, this.tip, this.spoken);
    this.size = Watch.sizeOf(this.box);
    this.scroll = {left: 0, top: 0}; // of the box: asking it would make a layout
    this.listen();
  }

  listen() {
    this.box.addEventListener("scroll", () => {
      const {scrollLeft: left, scrollTop: top} = this.box;
      if (left === this.scroll.left && top === this.scroll.top) return; // drawn by who scrolled
      this.scroll = {left, top};
      Watch.paintGrid(this);
    }, {passive: true});
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => this.point(null));
    this.box.addEventListener("click", (event) => {
      const at = this.placeOf(event);
      if (at !== null) Watch.set({step: at.step, request: at.id});
    });
    this.box.addEventListener("keydown", (event) => this.move(event));
    this.box.addEventListener("focus", () => {
      this.isByKeys = this.box.matches(":focus-visible"); // a click's focus has no ring
      Watch.redraw();
    });
    this.box.addEventListener("blur", () => Watch.redraw());
  }

  // -- sizes

  measure() {
    Object.assign(this, this.size); // width, height
    const longest = Math.max(3, ...this.rows.map((id) => Watch.label(id).length));
    const tag = Math.max(...this.rows.map((id) => Watch.tagOf(id).length));
    this.gutter = Math.min(110, 34 + 8 * longest) + Math.min(70, 7 * tag);
    this.tagAt = this.gutter - Math.min(70, 7 * tag);
    const fit = (room, num, least, most) =>
      Math.max(least, Math.min(most, Math.floor(room / Math.max(1, num))));
    const room = this.width - this.gutter - 4;
    this.cell = fit(room, Watch.numSteps(), CELL_MIN, CELL_MAX);
    this.row = fit(this.height - HEAD - 2, this.rows.length, ROW_MIN, ROW_MAX);
    this.makeEdges(room);
    this.space.style.width = `${this.gutter + this.edges.at(-1) + 4}px`;
    this.space.style.height = `${HEAD + this.row * this.rows.length + 2}px`;
  }

  // Where each column begins, and the last one ends. By time, a pixel is as long in both films;
  // what a film has not, at its end, is as wide as a step of the middle.
  makeEdges(room) {
    const told = `${room} ${this.cell} ${store.byTime} ${Watch.numSteps()}`;
    if (this.told === told) return;
    this.told = told;
    const widths = Array(Watch.numSteps()).fill(this.cell);
    if (store.byTime) {
      const sums = store.films.map((film) => {
        const rest = Watch.numSteps() - film.numSteps;
        return Watch.stepTimes(film).reduce((a, b) => a + b, 0) + rest * Watch.middleOf(film);
      });
      const middle = Watch.middleOf(this.view.film);
      const scale = Math.max(room / Math.max(...sums), CELL_MIN / middle);
      const times = Watch.stepTimes(this.view.film);
      widths.forEach((_, step) => {
        widths[step] = Math.max(TIMED_MIN, Math.round((times[step] ?? middle) * scale));
      });
    }
    let edge = 0;
    this.edges = [0, ...widths.map((width) => (edge += width))];
  }

  // The column at so many pixels from the first; behind the last: their number.
  columnAt(x) {
    return Math.max(0, this.edges.findLastIndex((edge) => edge <= x));
  }

  // Columns and rows that the box shows, whole or in part: [first, behind the last].
  shown() {
    const {left, top} = this.scroll;
    const right = left + this.width - this.gutter;
    const lastRow = Math.ceil((top + this.height - HEAD) / this.row);
    return {columns: [this.columnAt(left), Math.min(this.columnAt(right) + 1, Watch.numSteps())],
      rows: [Math.floor(top / this.row), Math.min(lastRow, this.rows.length)]};
  }

  // -- drawing

  draw() {
    if (this.size.width === 0) return; // not laid out yet: its size comes, and asks again
    if (this.view.film.isLive) [this.rows, this.told] = [Watch.requestIds(), null];
    this.measure();
    this.follow();
    Watch.paintGrid(this);
    const legendFor = `${store.language} ${this.view.film.numSteps}`; // a live film grows
    if (this.legendFor !== legendFor) {
      this.legendFor = legendFor;
      this.legend.replaceChildren(...Watch.gridLegend(this.view.film));
    }
    if (!this.byTime.isConnected && this.view.index === 0 && Watch.middleOf(this.view.film))
      this.box.closest("section").append(this.byTime);
    this.byTime.setAttribute("aria-pressed", String(Boolean(store.byTime)));
    this.speak();
  }

  // -- following: what moved is scrolled into sight, the rest is left where the reader put it.

  follow() {
    const step = Math.max(store.step, 0);
    const [x, y] = [this.edges[step], this.followedRow() * this.row];
    const end = this.edges[step + 1] ?? x;
    const [width, height] = [this.width - this.gutter, this.height - HEAD];
    if (this.seen.step !== store.step) this.isPointed = false; // its words cover the cells
    if (this.seen.step !== store.step || this.seen.width !== this.width) {
      const {left} = this.scroll;
      if (x < left) this.scrollTo({left: x - width * 0.7});
      else if (end > left + width) this.scrollTo({left: x - width * 0.3});
    }
    if (y >= 0 && (this.seen.step !== store.step || this.seen.request !== store.request)) {
      const {top} = this.scroll;
      if (y < top || y + this.row > top + height) this.scrollTo({top: y - this.row});
    }
    this.seen = {step: store.step, request: store.request, width: this.width};
  }

  scrollTo(place) {
    this.box.scrollTo(place);
    this.scroll = {left: this.box.scrollLeft, top: this.box.scrollTop};
  }

  // The request that was chosen, or one that computes, if none of those can be seen.
  followedRow() {
    if (store.request !== null) return this.rows.indexOf(store.request);
    const active = [...(this.view.facts?.cells.keys() ?? [])].map((id) => this.rows.indexOf(id));
    const {rows} = this.shown();
    if (!active.length || active.some((row) => row >= rows[0] && row < rows[1] - 1)) return -1;
    return Math.min(...active);
  }

  // -- pointer, keys, words

  placeOf(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const step = this.columnAt(x - this.gutter + this.scroll.left);
    const row = Math.floor((y - HEAD + this.scroll.top) / this.row);
    if (y < HEAD || row >= this.rows.length || step >= Watch.numSteps()) return null;
    return {id: this.rows[row], step: x < this.gutter ? store.step : step, x, y};
  }

  point(event) {
    const at = event && this.placeOf(event);
    this.isPointed = at !== null;
    if (at !== null) this.showTip(Watch.cellWords(this.view.film, at.id, at.step), at.x, at.y);
    else this.tip.hidden = true;
    if (store.hover.request !== at?.id)
      Watch.set({hover: at ? {request: at.id, film: this.view.index} : {}});
  }

  // Beside a place of the box, and always inside of the scene.
  showTip(words, x, y) {
    this.tip.hidden = false;
    Watch.say(this.tip, words);
    const {offsetWidth: width, offsetHeight: height} = this.tip;
    this.tip.style.left = `${Math.max(0, Math.min(x + 12, this.width - width - 4))}px`;
    this.tip.style.top = `${y + 18 + height < this.height ? y + 18 : y - height - 8}px`;
  }

  cursorRow() {
    return store.request === null ? 0 : this.rows.indexOf(store.request);
  }

  // Left and right are the page's own keys, too; here they move the cursor's cell.
  move(event) {
    const down = {ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10}[event.key];
    if (down === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.isByKeys = true;
    const isFirst = store.request === null && down > 0; // then it leads to the first row
    const from = isFirst ? -1 : this.cursorRow();
    const row = Math.min(this.rows.length - 1, Math.max(0, from + down));
    Watch.set({request: this.rows[row]});
  }

  speak() {
    const isHere = document.activeElement === this.box && !store.playing && store.step >= 0;
    const id = this.rows[this.cursorRow()];
    const words = isHere ? Watch.cellWords(this.view.film, id, store.step) : "";
    Watch.say(this.spoken, words);
    if (this.isPointed) return;
    if (!isHere || !this.isByKeys) this.tip.hidden = true;
    else this.showTip(words, ...this.cursorPlace());
  }

  // The middle of the cursor's cell, in the box.
  cursorPlace() {
    const middle = (this.edges[store.step] + this.edges[store.step + 1]) / 2;
    return [this.gutter + middle - this.scroll.left,
      HEAD + (this.cursorRow() + 0.5) * this.row - this.scroll.top];
  }
}

Watch.scene("grid", ["Requests and steps", "请求与步"], Grid);
