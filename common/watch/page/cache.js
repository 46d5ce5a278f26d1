"use strict";
// Scene 3, the prefix cache: chains of hashed blocks, or a radix tree whose nodes hold runs of
// blocks. What a step looked up is lit; what it published, cut and evicted is marked.
(() => {
  Watch.words({
    "cache.none": ["This run has no prefix cache (prefix_cache is None): each request computes its whole prompt, and its blocks are free as soon as it ends.",
      "本次运行没有前缀缓存（prefix_cache 为 None）：每个请求都要计算完整的提示词，结束后它的块立即空闲。"],
    "cache.hash": ["Hash chains: {n} blocks cached, {used} of them in use", "哈希链：缓存了 {n} 块，其中 {used} 块在使用"],
    "cache.radix": ["Radix tree: {n} blocks cached in {nodes} nodes, {used} of them in use",
      "基数树：{nodes} 个节点，缓存了 {n} 块，其中 {used} 块在使用"],
    "cache.empty": ["Nothing is cached yet.", "缓存还是空的。"],
    "cache.matched": ["looked up: ", "命中："],
    "cache.match": ["{request}: {n} blocks", "{request}：{n} 块"],
    "cache.match.one": ["{request}: 1 block", "{request}：1 块"],
    "cache.no_match": ["no look-up of this step found anything", "本步没有查到任何缓存"],
    "cache.boxes": ["Cached blocks. Left goes to the parent, right to a child, up and down to the next chain, Escape lets go.",
      "缓存的块。左键到父节点，右键到子节点，上下键到相邻的链，Esc 放开。"],
    "cache.did_split": ["split before {blocks}", "在{blocks} 之前拆分"],
    "cache.did_evict": ["evicted {blocks}", "淘汰{blocks}"],
    "cache.did_publish": ["published {blocks}", "发布{blocks}"],
    "cache.node": ["Node of {n} blocks: {blocks}", "节点含 {n} 块：{blocks}"],
    "cache.node.one": ["Node of 1 block: {blocks}", "节点含 1 块：{blocks}"],
    "cache.hint": ["Point at a box: its tokens, who uses it, and what comes before it. Filled: in use. Dark: matched in this step. + published, ‖ split, × evicted.",
      "指向一个方框：看它的 token、谁在用它、接在什么后面。浅色底：使用中；深色底：本步命中。＋ 发布，‖ 拆分，× 淘汰。"],
    "cache.tenant": ["tenant {tenant}", "租户 {tenant}"],
  });

  const {h} = Watch;
  const HEIGHT = Watch.CACHE_LANE;
  const WIDTH = {hash: 78, radix: 52}; // of a column, px: one block

  class Cache {
    constructor(root, view) {
      this.view = view;
      this.kind = view.film.run.prefix_cache;
      this.width = WIDTH[this.kind] ?? WIDTH.hash;
      this.boxes = [];
      this.shown = new Map(); // key of a box -> its element
      this.build(root);
    }

    build(root) {
      root.classList.add("cache");
      this.about = h("p", {class: "cache-about"});
      this.matches = h("p", {class: "cache-matches"});
      this.plane = h("div", {class: "cache-plane", role: "presentation"});
      const layout = Watch.cacheLayout(this.view.film); // as large as the film will ever need
      this.plane.style.width = `${layout.numColumns * this.width}px`;
      this.plane.style.height = `${layout.lanes.length * HEIGHT}px`;
      this.scroll = h("div", {class: "cache-scroll", role: "listbox", tabindex: 0}, this.plane);
      this.details = h("div", {class: "cache-details", tabindex: 0});
      root.append(this.about, this.matches, this.scroll, this.details);
      new ResizeObserver(() => Watch.redraw()).observe(this.scroll);
      this.scroll.addEventListener("scroll", () => {
        this.lookThrough();
        this.drawBoxes();
      });
      this.scroll.addEventListener("pointermove", (event) => this.onPointer(event));
      this.scroll.addEventListener("pointerleave", () => this.point(null));
      this.scroll.addEventListener("click", (event) => {
        const block = this.blockAt(event);
        if (block !== null) Watch.set({block: block === Watch.store.block ? null : block});
      });
      this.scroll.addEventListener("keydown", (event) => this.onKey(event));
    }

    // -- pointer and keys

    blockAt(event) {
      const element = event.target.closest?.(".cache-box");
      if (!element || element.classList.contains("is-gone")) return null;
      const {blocks} = element.box;
      const at = Math.floor((event.clientX - element.getBoundingClientRect().left) / this.width);
      return blocks[Math.min(Math.max(at, 0), blocks.length - 1)];
    }

    onPointer(event) {
      this.point(this.blockAt(event));
    }

    point(block) {
      const film = block === null ? null : this.view.index;
      if ((Watch.store.hover?.block ?? null) !== block) Watch.set({hover: {request: null, block, film}});
    }

    onKey(event) {
      const living = this.boxes.filter((box) => !box.isGone);
      const at = living.find((box) => box.blocks.includes(Watch.store.block)) ?? null;
      const next = at === null ? living[0] : this.neighbour(living, at, event.key);
      if (event.key === "Escape" && Watch.store.block !== null) Watch.set({block: null});
      else if (event.key.startsWith("Arrow") && next) Watch.set({block: next.blocks[0]});
      else if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      event.stopPropagation(); // else the page would step
      if (next) this.reveal([next]);
    }

    neighbour(living, at, key) {
      const {cached} = this.view.state;
      const parent = cached.get(at.blocks[0]).parent;
      const last = at.blocks.at(-1);
      if (key === "ArrowLeft") return living.find((box) => box.blocks.includes(parent));
      if (key === "ArrowRight") return living.find((box) => cached.get(box.blocks[0]).parent === last);
      const sign = key === "ArrowUp" ? -1 : 1;
      const others = living.filter((box) => (box.lane - at.lane) * sign > 0);
      const far = (box) => Math.abs(box.lane - at.lane) * 1000 + Math.abs(box.column - at.column);
      return others.sort((a, b) => far(a) - far(b))[0];
    }

    // Scroll as little as possible, so that the first of these boxes can be seen.
    reveal([box]) {
      const {scroll} = this;
      const [left, top] = [box.column * this.width, box.lane * HEIGHT];
      const right = left + Math.min(box.blocks.length * this.width, scroll.clientWidth);
      if (left < scroll.scrollLeft) scroll.scrollLeft = left;
      else if (right > scroll.scrollLeft + scroll.clientWidth) scroll.scrollLeft = right - scroll.clientWidth;
      if (top < scroll.scrollTop) scroll.scrollTop = top;
      else if (top + HEIGHT > scroll.scrollTop + scroll.clientHeight) {
        scroll.scrollTop = top + HEIGHT - scroll.clientHeight;
      }
    }

    // -- drawing

    draw() {
      const {view} = this;
      const isOff = this.kind === null;
      for (const part of [this.matches, this.scroll, this.details]) part.hidden = isOff;
      if (isOff) {
        this.about.classList.add("is-whole");
        this.about.textContent = Watch.t("cache.none");
        return;
      }
      this.facts = Watch.blockFacts(view);
      this.looked = Watch.lookedAt(view);
      this.lit = this.litBlocks();
      if (this.step !== view.step) this.boxes = Watch.cacheBoxes(view);
      this.drawAbout();
      this.scroll.setAttribute("aria-label", Watch.t("cache.boxes"));
      this.lookThrough();
      if (this.step !== view.step) this.follow();
      else if (this.chosen !== Watch.store.block) this.followChoice();
      [this.step, this.chosen] = [view.step, Watch.store.block];
      this.drawBoxes();
      this.drawDetails();
    }

    // What happens in a step should be seen: nothing moves if some of it is in sight already.
    follow() {
      const marked = this.boxes.filter((box) => box.isGone || box.numNew || box.isSplit || box.matched.length);
      if (!marked.length || marked.some((box) => this.isVisible(box))) return;
      this.reveal(marked.slice(-1));
      this.lookThrough();
    }

    // A block that was chosen elsewhere comes into sight.
    followChoice() {
      const box = this.boxes.find((one) => !one.isGone && one.blocks.includes(Watch.store.block));
      if (!box || this.isVisible(box)) return;
      this.reveal([box]);
      this.lookThrough();
    }

    isVisible({lane, column, blocks}) {
      const {left, top, right, bottom} = this.window;
      const [x, y] = [column * this.width, lane * HEIGHT];
      return x < right && x + blocks.length * this.width > left && y < bottom && y + HEIGHT > top;
    }

    // Asked once a drawing: the browser lays out the page to answer.
    lookThrough() {
      const {scrollLeft: left, scrollTop: top, clientWidth, clientHeight} = this.scroll;
      this.window = {left, top, right: left + clientWidth, bottom: top + clientHeight};
    }

    // The path to what is looked at: of a block its prefix, of a request the cached part of its table.
    litBlocks() {
      const {cached, requests} = this.view.state;
      const {block, request} = this.looked;
      const lit = new Set();
      for (let at = cached.has(block) ? block : null; at !== null; at = cached.get(at).parent) lit.add(at);
      for (const at of requests.get(request)?.table ?? []) if (cached.has(at)) lit.add(at);
      return lit;
    }

    drawAbout() {
      const {state} = this.view;
      const n = state.cached.size;
      const used = n - this.facts.evictable.length;
      this.about.textContent = n === 0 ? Watch.t("cache.empty")
        : Watch.t(`cache.${this.kind}`, {n, used, nodes: this.kind === "radix" ? state.nodeHeads.size : 0});
      const matches = [...Watch.matchesOf(this.view)].map(([id, found]) => h("button", {
        class: "cache-match", "data-request": id, "aria-pressed": Watch.store.request === id ? "true" : "false",
        onclick: () => Watch.set({request: Watch.store.request === id ? null : id}),
      }, Watch.t(found.size === 1 ? "cache.match.one" : "cache.match", {request: Watch.label(id), n: found.size})));
      const text = matches.length ? Watch.t("cache.matched") : Watch.t("cache.no_match");
      this.matches.replaceChildren(h("span", {class: "quiet"}, text), ...matches);
    }

    // In words, too: the map may be scrolled elsewhere, and a place may have a new owner already.
    eventsOfStep() {
      const of = (name) => (this.view.facts?.events ?? []).filter(({kind}) => kind === name);
      const blocks = {
        publish: of("published").flatMap(({kept, given}) => kept.filter((block, i) => block === given[i])),
        split: of("split").map(({block}) => block),
        evict: of("evicted").flatMap((event) => event.blocks),
      };
      return Object.entries(blocks).filter(([, found]) => found.length).map(([name, found]) =>
        h("p", {class: "cache-did", "data-did": name}, Watch.t(`cache.did_${name}`, {blocks: Watch.sayBlocks(found)})));
    }

    drawBoxes() {
      if (this.kind === null) return;
      const keys = new Set();
      for (const box of this.boxes) {
        if (!this.isVisible(box) && !this.crosses(box)) continue;
        const key = `${box.isGone ? "-" : ""}${box.blocks[0]}`;
        keys.add(key);
        if (!this.shown.has(key)) this.shown.set(key, Watch.addCacheBox(this.plane, `cache-${this.view.index}-${key}`));
        Watch.drawCacheBox(this, this.shown.get(key), box);
      }
      for (const [key, element] of this.shown) {
        if (keys.has(key)) continue;
        element.line.remove();
        element.remove();
        this.shown.delete(key);
      }
      const active = [...this.shown.values()].find((element) => element.ariaSelected === "true");
      this.scroll.setAttribute("aria-activedescendant", active?.id ?? "");
    }

    // Its line passes through what can be seen.
    crosses({lane, parent, column, blocks}) {
      return parent !== null && parent.lane < lane && this.isVisible({lane: parent.lane, column: column - 1, blocks})
        || parent !== null && this.isVisible({lane, column: column - 1, blocks});
    }

    drawDetails() {
      const {block} = this.looked;
      const {state} = this.view;
      const box = this.boxes.find((one) => !one.isGone && one.blocks.includes(block));
      if (!box) {
        this.details.replaceChildren(...this.eventsOfStep(), h("p", {class: "quiet"}, Watch.t("cache.hint")));
        return;
      }
      const {blocks} = box;
      const n = blocks.length;
      const title = this.kind === "radix"
        ? Watch.t(n === 1 ? "cache.node.one" : "cache.node", {n, blocks: Watch.blockRanges(blocks)})
        : Watch.t("pool.block", {block});
      const tenant = state.cached.get(block).tenant;
      const parts = [title, tenant && Watch.t("cache.tenant", {tenant}), Watch.describeBlock(this.view, this.facts, block)];
      const text = h("p", {class: "pool-tokens"});
      for (const one of blocks) {
        for (const token of Watch.blockTokens(this.view, one)) text.append(Watch.tokenChip(token.text));
      }
      this.details.replaceChildren(h("p", {}, parts.filter(Boolean).join(" · ")), text);
    }
  }

  // 3, 4, 5, 9 -> "3–5, 9"
  Watch.blockRanges = (blocks) => {
    const runs = [];
    for (const block of blocks) {
      const run = runs.at(-1);
      if (run && run[1] + 1 === block) run[1] = block;
      else runs.push([block, block]);
    }
    return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
  };

  Watch.scene({
    name: "cache",
    title: ["The prefix cache", "前缀缓存"],
    make(root, view) {
      const cache = new Cache(root, view);
      return {draw: () => cache.draw()};
    },
  });
})();
