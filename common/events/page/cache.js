// Scene 3, the prefix cache: chains of hashed blocks, or a radix tree whose nodes hold runs of
// blocks. What a step looked up is lit; what it published, cut and evicted is marked.
Watch.words({
  "cache.none": [
    "This run has no prefix cache (prefix_cache is None): each request computes its whole prompt, and its blocks are free as soon as it ends.",
    "本次运行没有前缀缓存（prefix_cache 为 None）：每个请求都要计算完整的 prompt，结束后它的块立即空闲。"],
  "cache.hash": ["Hash chains: {n} blocks cached, {used} of them in use",
    "哈希链：缓存了 {n} 块，其中 {used} 块在使用"],
  "cache.groups": ["Known by (group, hash): {n} blocks, {used} of them in use",
    "按（组，哈希）认识 {n} 块，其中 {used} 块在使用"],
  "cache.radix": ["Radix tree: {n} blocks cached in {nodes} nodes, {used} of them in use",
    "基数树：{nodes} 个节点，缓存了 {n} 块，其中 {used} 块在使用"],
  "cache.empty": ["Nothing is cached yet.", "缓存还是空的。"],
  "cache.matched": ["looked up: ", "命中："],
  "cache.match": ["{request}: {n} blocks", "{request}：{n} 块"],
  "cache.no_match": ["no look-up of this step found anything", "本步没有查到任何缓存"],
  "cache.boxes": [
    "Cached blocks. Left goes to the parent, right to a child, up and down to the next chain, Escape lets go.",
    "缓存的块。左键到父节点，右键到子节点，上下键到相邻的链，Esc 放开。"],
  "cache.did_split": ["split before {blocks}", "在{blocks} 之前拆分"],
  "cache.did_evict": ["evicted {blocks}", "淘汰{blocks}"],
  "cache.did_publish": ["published {blocks}", "发布{blocks}"],
  "cache.node": ["Node of {n} blocks: {blocks}", "节点含 {n} 块：{blocks}"],
  "cache.hint": [
    "Filled: in use; dark: matched now. ×3: ref_cnt, with the cache. + published, ‖ split, × evicted.",
    "浅色底：使用中；深色底：本步命中。×3：ref_cnt，含缓存。＋ 发布，‖ 拆分，× 淘汰。"],
  "cache.hint.groups": [
    "Dotted: of layers with a window. Filled: in use; dark: found now. An unused block can be found until it is taken.",
    "点线框：有窗口的层。浅色底：使用中；深色底：本步找到。未使用的块，在被重新取用之前都找得到。"],
  "cache.details": ["What is pointed at in the cache", "缓存中所指之处的详情"],
  "cache.tenant": ["tenant {tenant}", "租户 {tenant}"],
});

const {h, t} = Watch;

class Cache {
  constructor(root, view) {
    this.view = view;
    this.kind = view.film.run.prefix_cache;
    this.map = new Watch.CacheMap(view);
    this.about = h("p", {class: "cache-about"});
    this.matches = h("p", {class: "cache-matches"});
    this.details = h("div", {class: "cache-details", role: "group", label: "cache.details"});
    root.classList.add("cache");
    const isOff = this.kind === null;
    for (const part of [this.matches, this.map.root, this.details]) part.hidden = isOff;
    this.about.classList.toggle("is-whole", isOff);
    root.append(this.about, this.matches, this.map.root, this.details);
  }

  draw() {
    if (this.kind === null) {
      this.about.textContent = t("cache.none");
      return;
    }
    this.facts = Watch.blockFacts(this.view);
    this.looked = Watch.lookedAt(this.view);
    this.drawAbout();
    this.map.draw(this.facts, this.litBlocks());
    this.drawDetails();
  }

  // The path to what is looked at: of a block its prefix, of a request the cached part of its
  // table.
  litBlocks() {
    const {cached} = this.view.state;
    const {block, request} = this.looked;
    const lit = new Set();
    // A parent may be gone, and its place have a new owner: then the path ends, and never circles.
    for (let at = block; at in cached && !lit.has(at); at = cached[at].parent) lit.add(at);
    const tables = this.view.request(request)?.tables ?? [];
    for (const at of tables.flat()) if (at in cached) lit.add(at);
    return lit;
  }

  drawAbout() {
    const {film, state} = this.view;
    const n = Object.keys(state.cached).length;
    const used = n - this.facts.evictable.length;
    const nodes = Object.values(state.cached).filter((row) => row.begins_node).length;
    const key = n === 0 ? "empty" : film.cacheRefs ? this.kind : "groups";
    this.about.textContent = t(`cache.${key}`, {n, used, nodes});
    const matches = [...Watch.matchesOf(this.view)].map(([id, found]) => {
      const attributes = {class: "cache-match", tabindex: -1, "data-request": id,
        "aria-pressed": String(Watch.store.request === id), onclick: () => Watch.toggle(id)};
      const values = {request: Watch.label(id), n: found.size};
      return h("button", attributes, t("cache.match", values));
    });
    const text = t(matches.length ? "cache.matched" : "cache.no_match");
    this.matches.replaceChildren(h("span", {class: "quiet"}, text), ...matches);
  }

  // In words, too: the map may be scrolled elsewhere, and a place may have a new owner already.
  eventsOfStep() {
    const frames = this.view.facts?.frames ?? [];
    const found = {
      publish: frames.flatMap(({published}) => published.flatMap(([, blocks]) => blocks)),
      split: frames.flatMap(({split}) => split),
      evict: frames.flatMap(({evicted}) => evicted),
    };
    return Object.entries(found).filter(([, blocks]) => blocks.length).map(([name, blocks]) =>
      h("p", {class: "cache-did", "data-did": name},
        t(`cache.did_${name}`, {blocks: Watch.sayBlocks(blocks)})));
  }

  drawDetails() {
    const {block} = this.looked;
    const {film, state} = this.view;
    const box = this.map.boxOf(block);
    if (box === null) {
      const hint = t(`cache.hint${film.cacheRefs ? "" : ".groups"}`);
      this.details.replaceChildren(...this.eventsOfStep(), h("p", {class: "quiet"}, hint));
      return;
    }
    const {blocks} = box;
    const {tenant} = state.cached[block];
    const about = Watch.joined(
      this.kind === "hash" ? t("pool.block", {block})
        : t("cache.node", {n: blocks.length, blocks: Watch.blockRanges(blocks)}),
      tenant && t("cache.tenant", {tenant}),
      Watch.describeBlock(this.view, this.facts, block));
    const tokens = blocks.flatMap((one) => Watch.blockTokens(this.view, one));
    this.details.replaceChildren(h("p", {}, about), Watch.tokenLine(tokens));
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
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`))
    .join(", ");
};

Watch.scene("cache", ["The prefix cache", "前缀缓存"], Cache);
