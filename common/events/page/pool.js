// Scene 2, the block pool: every block a cell. Whose it is, how many hold it, what is published,
// what is free, and who is next in line to be taken or evicted.
Watch.words({
  "pool.cells": ["Blocks of the pool. Arrow keys go from block to block, Escape lets go.",
    "块池中的块。方向键逐块移动，Esc 放开。"],
  "pool.counts": ["{held} in use · {idle} cached, unused · {free} free · of {all}",
    "使用中 {held} · 已缓存未用 {idle} · 空闲 {free} · 共 {all}"],
  "pool.drawn": ["drawn: the first {num}", "只画前 {num} 块"],
  "pool.large": [
    "The KV memory has {all} blocks of {size} tokens: room for {tokens} tokens. Drawn are the first of them, as far as they have been used.",
    "KV 内存共 {all} 个块，每块 {size} 个 token，能存 {tokens} 个 token 的 KV。这里画出前面用过的块。"],
  "pool.next_taken": ["next taken", "将取用"],
  "pool.next_evicted": ["next evicted", "将淘汰"],
  "pool.was.taken": ["taken", "取用"],
  "pool.was.shared": ["shared", "共享"],
  "pool.was.published": ["published", "发布"],
  "pool.was.freed": ["freed", "释放"],
  "pool.was.evicted": ["evicted", "淘汰"],
  "pool.was.loaded": ["loaded", "加载"],
  "pool.details": ["What is pointed at", "所指之处的详情"],
  "pool.this_step": ["This step", "本步"],
});

const {h, t} = Watch;

const MOST_DRAWN = 2048; // of a larger pool, what has been used: a cell has to be seen
const LEAST_DRAWN = 128;
const LEGEND = ["taken", "shared", "published", "freed", "evicted", "loaded"];

// What is looked at: the pointer goes before the selection, a block before a request.
Watch.lookedAt = (view) => {
  const {hover: {film, ...at}, block, request} = Watch.store;
  if ((film ?? view.index) === view.index && at.block != null) return {...at, request: null};
  if (at.request != null) return {...at, block: null};
  return block !== null ? {block, request: null} : {block: null, request};
};

// Lets a reader point at blocks, choose one by a click, and go from one to another by keys: `next`
// says where a key leads, undefined: nowhere.
Watch.letPoint = (element, view, blockAt, next) => {
  const {store} = Watch;
  const look = (block) => {
    const film = block === null ? null : view.index;
    if ((store.hover?.block ?? null) !== block) Watch.set({hover: {request: null, block, film}});
  };
  element.addEventListener("pointermove", (event) => look(blockAt(event)));
  element.addEventListener("pointerleave", () => look(null));
  element.addEventListener("click", (event) => {
    const block = blockAt(event);
    if (block !== null) Watch.set({block: block === store.block ? null : block});
  });
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const isEscape = event.key === "Escape" && store.block !== null;
    const block = isEscape ? null : next(event.key);
    if (block === undefined) return;
    Watch.set({block});
    event.preventDefault(); // else the page would step
  });
  new ResizeObserver(() => Watch.redraw()).observe(element);
};

class Pool {
  constructor(root, view) {
    this.view = view;
    this.grid = null;
    this.numDrawn = 0;
    // Nothing can be loaded where there is nothing below.
    const {kv_tiers: tiers, kv_connector: connector} = view.film.run.config;
    const isLoading = tiers || connector || view.film.lines.some(({changes}) => changes.loaded);
    this.legend = LEGEND.filter((change) => change !== "loaded" || isLoading);
    root.classList.add("pool");
    root.classList.toggle("has-groups", view.film.run.windows.length > 0);
    this.counts = h("p", {class: "pool-counts"});
    const id = `pool-cells-${view.index}`;
    this.cells = h("div",
      {class: "pool-cells", id, tabindex: 0, role: "listbox", label: "pool.cells"});
    const changes = `pool-changes of-${this.legend.length}`;
    this.changes = h("p", {class: changes, role: "group", label: "pool.this_step"});
    this.orders = h("div", {class: "pool-orders"});
    this.details = h("div", {class: "pool-details", role: "group", label: "pool.details"});
    root.append(this.counts, this.cells, this.changes, this.orders, this.details);
    const blockAt = (event) => this.painter.at(event);
    Watch.letPoint(this.cells, view, blockAt, (key) => this.next(key));
  }

  // Where a key leads from the block that is chosen.
  next(key) {
    if (this.grid === null) return undefined; // not drawn yet
    const {columns, num} = this.grid;
    const at = Watch.store.block ?? 0;
    const moves = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - columns, ArrowDown: at + columns,
      Home: 0, End: num - 1,
    };
    return key in moves ? Math.min(Math.max(moves[key], 0), num - 1) : undefined;
  }

  draw() {
    const {view} = this;
    const facts = Watch.blockFacts(view);
    this.reach(facts);
    this.fit();
    const looked = Watch.lookedAt(view);
    this.drawCells(facts, looked);
    this.drawCounts(facts);
    this.drawChanges(facts);
    this.drawOrders(facts);
    this.details.replaceChildren(...Watch.poolDetails(view, facts, looked, this.numDrawn));
    const active = this.cursor() === null ? "" : this.painter.active(this.cursor());
    this.cells.setAttribute("aria-activedescendant", active);
  }

  // Fresh blocks are taken in order. Cells are added, and never taken away.
  reach(facts) {
    const {film, state} = this.view;
    const used = [...Object.keys(state.refs), ...Object.keys(state.cached)].map(Number);
    const last = [...used, ...facts.changes.keys()].reduce((a, b) => Math.max(a, b), 0);
    let num = film.run.num_blocks;
    if (num > MOST_DRAWN) {
      num = Math.max(this.numDrawn, LEAST_DRAWN);
      while (num <= last) num *= 2;
      num = Math.min(num, MOST_DRAWN);
    }
    if (num === this.numDrawn) return;
    this.numDrawn = num;
    this.grid = null;
    this.cells.replaceChildren();
    this.painter = new Watch.PoolPainter(this.cells);
  }

  fit() {
    const {clientWidth: width, clientHeight: height} = this.cells;
    if (this.grid?.width === width && this.grid?.height === height) return;
    this.grid = {...Watch.poolGrid(width, height, this.numDrawn), width, height};
    this.painter.resize(this.grid);
    this.looks = []; // of each block, what its look said last
  }

  drawCells(facts, looked) {
    const {view} = this;
    const tables = view.request(looked.request)?.tables ?? [];
    const places = tables.flatMap((table) => table.map((block, place) => [block, place]));
    const lit = places.length === 0 ? null : new Map(places.filter(([block]) => block));
    const numbered = (block, i) => [block, i + 1];
    const order = new Map([...facts.nextTaken.map(numbered), ...facts.nextEvicted.map(numbered)]);
    const {hasLabels} = this.grid;
    const how = {lit, block: looked.block, cursor: this.cursor(), order, hasLabels};
    for (let block = 0; block < this.grid.num; block++) {
      const look = Watch.poolLook(this.view, facts, block, how);
      const said = [Watch.store.language, ...Object.values(look)].join(" "); // cheaper than paint
      if (said === this.looks[block]) continue;
      this.looks[block] = said;
      this.painter.paint(block, look, () => this.nameOf(facts, block));
    }
  }

  // The other film of a comparison may have more blocks.
  cursor() {
    const {block} = Watch.store;
    return block !== null && block < this.numDrawn ? block : null;
  }

  nameOf(facts, block) {
    return `${t("pool.block", {block})} · ${Watch.describeBlock(this.view, facts, block)}`;
  }

  drawCounts(facts) {
    const all = this.view.film.run.num_blocks - 1;
    const [idle, free] = [facts.evictable.length, facts.numFree];
    const text = Watch.joined(t("pool.counts", {held: all - idle - free, idle, free, all}),
      this.numDrawn <= all && t("pool.drawn", {num: this.numDrawn - 1}));
    Watch.say(this.counts, text);
    this.counts.title = text; // of which the line may have room for a part
  }

  // The legend of the outlines is at once what happened: a sample, a word and how many blocks.
  drawChanges(facts) {
    const all = [...facts.changes.values()].flat();
    const parts = this.legend.map((change) => {
      const n = all.filter((kind) => kind === change).length;
      const look = n ? "pool-change" : "pool-change is-none";
      return h("span", {class: look, "data-change": change, "data-count": n},
        h("span", {class: `pool-sample was-${change}`}),
        `${t(`pool.was.${change}`)}${n ? ` ${n}` : ""}`);
    });
    this.changes.replaceChildren(...parts);
  }

  drawOrders(facts) {
    const rows = [["next_taken", facts.nextTaken], ["next_evicted", facts.nextEvicted]];
    const {cacheRefs} = this.view.film;
    this.orders.replaceChildren(...rows.slice(0, 1 + cacheRefs).map(([name, blocks]) => {
      const next = blocks.map((block) =>
        h("span", {class: "pool-next", "data-block": block}, String(block)));
      return h("p", {class: "pool-order-row", "data-order": name},
        h("span", {class: "pool-order-name"}, t(`pool.${name}`)),
        ...(next.length ? next : [t("list.none")]));
    }));
  }
}

Watch.scene("pool", ["The block pool", "块池"], Pool);
