"use strict";
// Scene 3, the prefix cache: chains of hashed blocks, or a radix tree whose nodes hold runs of
// blocks. What a step looked up is lit; what it published, cut and evicted is marked.
(() => {
  Watch.words({
    "cache.none": ["This run has no prefix cache (prefix_cache is None): each request computes its whole prompt, and its blocks are free as soon as it ends.",
      "本次运行没有前缀缓存（prefix_cache 为 None）：每个请求都要计算完整的提示，结束后它的块立即空闲。"],
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
    "cache.new": ["published", "发布"],
    "cache.split": ["split", "分裂"],
    "cache.gone": ["evicted", "淘汰"],
    "cache.hit": ["match", "命中"],
    "cache.users": ["×{n}", "×{n}"],
    "cache.node": ["Node of {n} blocks: {blocks}", "节点含 {n} 块：{blocks}"],
    "cache.node.one": ["Node of 1 block: {blocks}", "节点含 1 块：{blocks}"],
    "cache.hint": ["Point at a box: its tokens, who uses it, and what comes before it.",
      "指向一个方框：看它的 token、谁在用它、它接在什么后面。"],
    "cache.tenant": ["tenant {tenant}", "租户 {tenant}"],
  });

  const {h} = Watch;
  const HEIGHT = 44; // of a lane, px
  const WIDTH = {hash: 78, radix: 54}; // of a column: one block
  const GAP = 10; // between two columns, for the lines

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
      this.scroll = h("div", {class: "cache-scroll", role: "listbox", tabindex: 0}, this.plane);
      this.details = h("div", {class: "cache-details", tabindex: 0});
      root.append(this.about, this.matches, this.scroll, this.details);
      this.scroll.addEventListener("scroll", () => this.drawBoxes());
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
        this.about.textContent = Watch.t("cache.none");
        return;
      }
      this.facts = Watch.blockFacts(view);
      this.looked = Watch.lookedAt(view);
      this.lit = this.litBlocks();
      if (this.step !== view.step) this.boxes = Watch.cacheBoxes(view);
      this.drawAbout();
      const layout = Watch.cacheLayout(view.film);
      this.plane.style.width = `${layout.numColumns * this.width}px`;
      this.plane.style.height = `${layout.lanes.length * HEIGHT}px`;
      this.scroll.setAttribute("aria-label", Watch.t("cache.boxes"));
      if (this.step !== view.step) this.follow();
      this.step = view.step;
      this.drawBoxes();
      this.drawDetails();
    }

    // What happens in a step should be seen: nothing moves if some of it is in sight already.
    follow() {
      const marked = this.boxes.filter((box) => box.isGone || box.numNew || box.isSplit || box.matched.length);
      if (marked.length && !marked.some((box) => this.isVisible(box))) this.reveal(marked.slice(-1));
    }

    isVisible({lane, column, blocks}) {
      const {scrollLeft, scrollTop, clientWidth, clientHeight} = this.scroll;
      const [left, top] = [column * this.width, lane * HEIGHT];
      return left < scrollLeft + clientWidth && left + blocks.length * this.width > scrollLeft
        && top < scrollTop + clientHeight && top + HEIGHT > scrollTop;
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

    drawBoxes() {
      if (this.kind === null) return;
      const keys = new Set();
      for (const box of this.boxes) {
        if (!this.isVisible(box) && !this.crosses(box)) continue;
        const key = `${box.isGone ? "-" : ""}${box.blocks[0]}`;
        keys.add(key);
        if (!this.shown.has(key)) this.shown.set(key, this.addBox(key));
        this.drawBox(this.shown.get(key), box);
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

    addBox(key) {
      const part = (name) => h("span", {class: `cache-${name}`});
      const parts = {name: part("name"), users: part("users"), text: part("text"), mark: part("mark")};
      const element = h("div", {class: "cache-box", role: "option", id: `cache-${this.view.index}-${key}`},
        h("span", {class: "cache-top"}, parts.name, parts.users, parts.mark), parts.text);
      element.parts = parts;
      element.line = h("span", {class: "cache-line", "aria-hidden": "true"});
      this.plane.append(element.line, element);
      return element;
    }

    drawBox(element, box) {
      const {state} = this.view;
      const {blocks, lane, column} = box;
      element.box = box;
      element.dataset.blocks = blocks.join(" ");
      element.style.left = `${column * this.width + GAP}px`;
      element.style.top = `${lane * HEIGHT + 4}px`;
      element.style.width = `${blocks.length * this.width - GAP}px`;
      const users = box.isGone ? 0 : state.refCnt[blocks[0]] - 1;
      const isLit = !box.isGone && blocks.some((block) => this.lit.has(block));
      const classes = ["cache-box"];
      if (box.isGone) classes.push("is-gone");
      if (box.matched.length) classes.push("is-match");
      if (box.numNew) classes.push("is-new");
      if (box.isSplit) classes.push("is-split");
      if (users > 0) classes.push("is-used");
      if (isLit) classes.push("is-lit");
      element.className = classes.join(" ");
      element.ariaSelected = !box.isGone && blocks.includes(Watch.store.block) ? "true" : "false";
      element.parts.name.textContent = Watch.blockRanges(blocks);
      element.parts.users.textContent = users > 0 ? Watch.t("cache.users", {n: users}) : "";
      element.parts.mark.textContent = this.markOf(box);
      element.parts.text.textContent = box.isGone ? "" : this.textOf(blocks);
      element.setAttribute("aria-label", this.nameOf(box));
      this.drawLine(element.line, box);
    }

    markOf(box) {
      const mark = box.isGone ? "gone" : box.isSplit ? "split" : box.numNew ? "new" : box.matched.length ? "hit" : "";
      return mark && Watch.t(`cache.${mark}`);
    }

    textOf(blocks) {
      const {cached} = this.view.state;
      return blocks.flatMap((block) => cached.get(block).tokens).map((token) => Watch.pieceOf(this.view.film, token)).join("");
    }

    nameOf(box) {
      const what = Watch.t("pool.block", {block: Watch.blockRanges(box.blocks)});
      if (box.isGone) return `${what} · ${Watch.t("cache.gone")}`;
      return [what, Watch.describeBlock(this.view, this.facts, box.blocks[0]), this.markOf(box)].filter(Boolean).join(" · ");
    }

    // From the parent's box to this one: straight on, or down (up) to another lane.
    drawLine(line, {lane, column, parent}) {
      line.hidden = parent === null;
      if (parent === null) return;
      const middle = (at) => at * HEIGHT + HEIGHT / 2;
      const [from, to] = [middle(parent.lane), middle(lane)];
      line.className = `cache-line ${to < from ? "is-up" : ""}`;
      line.style.left = `${column * this.width + (from === to ? 0 : GAP / 2)}px`;
      line.style.width = `${from === to ? GAP : GAP / 2}px`;
      line.style.top = `${Math.min(from, to)}px`;
      line.style.height = `${Math.max(1, Math.abs(to - from))}px`;
    }

    drawDetails() {
      const {block} = this.looked;
      const {state} = this.view;
      const box = this.boxes.find((one) => !one.isGone && one.blocks.includes(block));
      if (!box) {
        this.details.replaceChildren(h("p", {class: "quiet"}, Watch.t("cache.hint")));
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
