"use strict";
// Scene 2, the block pool: every block a cell. Whose it is, how many hold it, what is published,
// what is free, and who is next in line to be taken or evicted.
(() => {
  Watch.words({
    "pool.cells": [
      "Blocks of the pool. Arrow keys go from block to block, Escape lets go.",
      "块池中的块。方向键逐块移动，Esc 放开。",
    ],
    "pool.counts": [
      "{held} in use · {idle} cached, unused · {free} free · of {all}",
      "使用中 {held} · 已缓存未用 {idle} · 空闲 {free} · 共 {all}",
    ],
    "pool.drawn": ["drawn: the first {num}", "只画前 {num} 块"],
    "pool.large": [
      "The KV memory has {all} blocks of {size} tokens: room for {tokens} tokens. Blocks that are not drawn have not been used yet.",
      "KV 内存共 {all} 个块，每块 {size} 个 token，能存 {tokens} 个 token 的 KV。没有画出的块还没用过。"],
    "pool.next_taken": ["next taken", "将取用"],
    "pool.next_evicted": ["next evicted", "将淘汰"],
    "pool.none": ["none", "无"],
    "pool.was.taken": ["taken", "取用"],
    "pool.was.shared": ["shared", "共享"],
    "pool.was.published": ["published", "发布"],
    "pool.was.freed": ["freed", "释放"],
    "pool.was.evicted": ["evicted", "淘汰"],
    "pool.was.loaded": ["loaded", "加载"],
    "pool.details": ["What is pointed at", "所指之处的详情"],
    "pool.this_step": ["This step", "本步"],
  });

  const {h} = Watch;

  const MOST_DRAWN = 4096; // of a larger pool, only what has been used: a cell has to be seen
  const LEAST_DRAWN = 128;
  const NOTHING = {lit: null, block: null, cursor: null}; // is looked at

  // What is looked at: the pointer goes before the selection, a block before a request.
  Watch.lookedAt = (view) => {
    const {hover = {}, block = null, request = null} = Watch.store;
    const isHere = hover.film === undefined || hover.film === null || hover.film === view.index;
    if (isHere && (hover.block ?? null) !== null) return {block: hover.block, request: null};
    if ((hover.request ?? null) !== null) return {block: null, request: hover.request};
    return block !== null ? {block, request: null} : {block: null, request};
  };

  class Pool {
    constructor(root, view) {
      this.root = root;
      this.view = view;
      this.grid = null;
      this.numDrawn = 0;
      // Nothing can be loaded where there is nothing below.
      const {kv_tiers: tiers, kv_connector: connector} = view.film.run.config;
      const isLoading =
        Boolean(tiers || connector) || view.film.events.some(({kind}) => kind === "loaded");
      this.legend = [
        "taken",
        "shared",
        "published",
        "freed",
        "evicted",
        ...(isLoading ? ["loaded"] : []),
      ];
      this.build();
    }

    build() {
      this.root.classList.add("pool");
      this.root.classList.toggle("has-groups", this.view.film.run.windows.length > 0);
      this.counts = h("p", {class: "pool-counts"});
      this.cells = h("div", {class: "pool-cells"});
      this.cells.id = `pool-cells-${this.view.index}`;
      this.cells.tabIndex = 0;
      this.cells.setAttribute("role", "listbox");
      this.changes = h("p", {class: `pool-changes of-${this.legend.length}`, role: "group"});
      this.orders = h("div", {class: "pool-orders"});
      this.details = h("div", {class: "pool-details"});
      this.details.setAttribute("role", "group");
      this.root.append(this.counts, this.cells, this.changes, this.orders, this.details);
      this.listen();
      new ResizeObserver(() => Watch.redraw()).observe(this.cells);
    }

    listen() {
      const look = (block) => {
        const {hover} = Watch.store;
        const film = block === null ? null : this.view.index;
        if ((hover?.block ?? null) !== block) Watch.set({hover: {request: null, block, film}});
      };
      this.cells.addEventListener("pointermove", (event) => look(this.painter.at(event)));
      this.cells.addEventListener("pointerleave", () => look(null));
      this.cells.addEventListener("click", (event) => this.choose(this.painter.at(event)));
      this.cells.addEventListener("keydown", (event) => this.onKey(event));
    }

    choose(block) {
      Watch.set({block: block === Watch.store.block ? null : block});
    }

    onKey(event) {
      if (event.ctrlKey || event.altKey || event.metaKey || this.grid === null) return; // not drawn yet
      const {columns, num} = this.grid;
      const at = Watch.store.block ?? 0;
      const moves = {
        ArrowLeft: at - 1,
        ArrowRight: at + 1,
        ArrowUp: at - columns,
        ArrowDown: at + columns,
        Home: 0,
        End: num - 1,
      };
      if (event.key in moves) {
        Watch.set({block: Math.min(Math.max(moves[event.key], 0), num - 1)});
      } else if (event.key === "Escape" && Watch.store.block !== null) {
        Watch.set({block: null});
      } else {
        return;
      }
      event.preventDefault(); // else the page would step
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
      const details = this.isAboutAll(looked) ? [this.aboutAll()] : Watch.poolDetails(view, facts, looked);
      this.details.replaceChildren(...details);
      this.cells.setAttribute("aria-label", Watch.t("pool.cells"));
      this.details.setAttribute("aria-label", Watch.t("pool.details"));
      const active = this.cursor() === null ? "" : this.painter.active(this.cursor());
      this.cells.setAttribute("aria-activedescendant", active);
    }

    isAboutAll({block, request}) {
      return block === null && request === null && this.numDrawn < this.view.film.run.num_blocks;
    }

    aboutAll() {
      const {num_blocks: num, block_size: size} = this.view.film.run;
      const number = (n) => n.toLocaleString("en");
      const values = {all: number(num - 1), size, tokens: number((num - 1) * size)};
      return h("p", {class: "pool-about quiet"}, Watch.t("pool.large", values));
    }

    // Fresh blocks are taken in order. Cells are added, and never taken away.
    reach(facts) {
      const {film, state} = this.view;
      const isUsed = (n, block) => n > 0 || state.cached.has(block);
      const last = Math.max(state.refCnt.findLastIndex(isUsed), ...facts.changes.keys());
      let num = film.run.num_blocks;
      if (num > MOST_DRAWN) {
        num = Math.max(this.numDrawn, LEAST_DRAWN);
        while (num <= last) num *= 2;
        num = Math.min(num, film.run.num_blocks);
      }
      if (num === this.numDrawn) return;
      this.numDrawn = num;
      this.grid = null;
      this.cells.replaceChildren();
      this.painter = Watch.poolPainter(this.cells, num);
    }

    fit() {
      const {clientWidth: width, clientHeight: height} = this.cells;
      if (this.grid?.width === width && this.grid?.height === height) return;
      const grid = Watch.poolGrid(width, height, this.numDrawn);
      this.grid = {...grid, width, height};
      this.painter.resize(this.grid);
      this.drawn = null;
    }

    drawCells(facts, looked) {
      const {view} = this;
      const tables = view.state.requests.get(looked.request)?.tables ?? [[]];
      const places = tables.flatMap((table) => table.map((block, place) => [block, place]));
      const lit = places.length === 0 ? null : new Map(places.filter(([block]) => block));
      const cursor = this.cursor();
      // A canvas shows what is looked at in a layer of its own.
      const isDue = !this.painter.isLayered || this.drawn !== facts;
      if (isDue)
        this.drawLooks(
          facts,
          this.painter.isLayered ? NOTHING : {lit, block: looked.block, cursor},
        );
      this.drawn = facts;
      this.painter.point(lit, looked.block, cursor, () => this.nameOf(facts, cursor));
    }

    drawLooks(facts, looked) {
      const order = new Map();
      facts.nextTaken.forEach((block, i) => order.set(block, i + 1));
      facts.nextEvicted.forEach((block, i) => order.set(block, i + 1));
      const how = {...looked, order, hasLabels: this.grid.hasLabels};
      for (let block = 0; block < this.grid.num; block++) {
        const look = Watch.poolLook(this.view, facts, block, how);
        this.painter.paint(block, look, () => this.nameOf(facts, block));
      }
    }

    // The other film of a comparison may have more blocks.
    cursor() {
      const {block} = Watch.store;
      return block !== null && block < this.numDrawn ? block : null;
    }

    nameOf(facts, block) {
      return `${Watch.t("pool.block", {block})} · ${Watch.describeBlock(this.view, facts, block)}`;
    }

    drawCounts(facts) {
      const all = this.view.film.run.num_blocks - 1;
      const [idle, free] = [facts.evictable.length, facts.numFree];
      const text = [Watch.t("pool.counts", {held: all - idle - free, idle, free, all})];
      if (this.numDrawn <= all) text.push(Watch.t("pool.drawn", {num: this.numDrawn - 1}));
      Watch.say(this.counts, text.join(" · "));
      this.counts.title = text.join(" · "); // of which the line may have room for a part
    }

    // The legend of the outlines is at once what happened: a sample, a word and how many blocks.
    drawChanges(facts) {
      const counts = new Map(Watch.blockChanges.map((change) => [change, 0]));
      for (const kinds of facts.changes.values())
        for (const kind of kinds) counts.set(kind, counts.get(kind) + 1);
      const parts = this.legend.map((change) => {
        const n = counts.get(change);
        return h(
          "span",
          {
            class: n ? "pool-change" : "pool-change is-none",
            "data-change": change,
            "data-count": n,
          },
          h("span", {class: `pool-sample was-${change}`}),
          `${Watch.t(`pool.was.${change}`)}${n ? ` ${n}` : ""}`,
        );
      });
      this.changes.setAttribute("aria-label", Watch.t("pool.this_step"));
      this.changes.replaceChildren(...parts);
    }

    drawOrders(facts) {
      const rows = [
        ["next_taken", facts.nextTaken],
        ["next_evicted", facts.nextEvicted],
      ].slice(0, 1 + this.view.state.cacheRefs);
      this.orders.replaceChildren(
        ...rows.map(([name, blocks]) => {
          const next = blocks.map((block) =>
            h("span", {class: "pool-next", "data-block": block}, String(block)),
          );
          return h(
            "p",
            {class: "pool-order-row", "data-order": name},
            h("span", {class: "pool-order-name"}, Watch.t(`pool.${name}`)),
            ...(next.length ? next : [Watch.t("pool.none")]),
          );
        }),
      );
    }
  }

  Watch.scene({
    name: "pool",
    title: ["The block pool", "块池"],
    make(root, view) {
      const pool = new Pool(root, view);
      return {draw: () => pool.draw()};
    },
  });
})();
