"use strict";
// Below the pool: what is known of the block, or the table of the request, that is looked at.
(() => {
  const {h} = Watch;
  Watch.words({
    "pool.block": ["Block {block}", "块 {block}"],
    "pool.is.null": [
      "the null block: never allocated, padding points to it",
      "空块：从不分配，填充位置都指向它",
    ],
    "pool.is.free": ["free", "空闲"],
    "pool.is.held": ["in use", "使用中"],
    "pool.is.idle": ["cached, and no request uses it", "在缓存里，没有请求使用"],
    "pool.is.loading": ["KV is being loaded into it", "正在把 KV 加载进来"],
    "pool.refs": ["{n} references: {who}", "引用计数 {n}：{who}"],
    "pool.ref": ["1 reference: {who}", "引用计数 1：{who}"],
    "pool.the_cache": ["the cache", "缓存"],
    "pool.a_load": ["the load for {request}", "{request} 的加载"],
    "pool.positions": ["positions {first}–{last}", "位置 {first}–{last}"],
    "pool.written": ["{n} of {size} written", "已写 {n}/{size}"],
    "pool.hash": ["hash {hash}", "哈希 {hash}"],
    "pool.parent": ["after block {parent}", "接在块 {parent} 之后"],
    "pool.no_parent": ["first of its prefix", "前缀的第一块"],
    "pool.published": ["published", "已发布"],
    "pool.nth_taken": ["{n}. to be taken", "第 {n} 个被取用"],
    "pool.nth_evicted": ["{n}. to be evicted", "第 {n} 个被淘汰"],
    "pool.now": ["in this step: {what}", "本步：{what}"],
    "pool.table": ["Block table of {request}: {n} blocks", "{request} 的块表：{n} 块"],
    "pool.table.one": ["Block table of {request}: 1 block", "{request} 的块表：1 块"],
    "pool.table.none": ["{request} has no block table: it {why}.", "{request} 没有块表：它{why}。"],
    "pool.table.waits": ["waits", "在排队"],
    "pool.table.ended": ["has ended", "已结束"],
    "pool.table.later": ["has not arrived", "还没到达"],
    "pool.table.elsewhere": ["is not in this run", "不在本次运行中"],
    "pool.position": ["position", "位置"],
    "pool.in_block": ["block", "块"],
    "pool.group": ["group {group}, sees all", "组 {group}，看到全部"],
    "pool.group.window": ["group {group}, window {window}", "组 {group}，窗口 {window}"],
    "pool.tables": ["Block tables of {request}, one for each group of layers", "{request} 的块表，每组层一张"],
    "pool.given_up": ["given up: no token to come sees it", "已交还：之后的 token 都看不到它"],
    "pool.found": ["found in the cache in this step", "本步在缓存里找到"],
    "pool.shared_by": ["also {who}", "同用：{who}"],
    "pool.hint.groups": [
      "Point at a block or a request. a₁: of a, group 1. Filled corner: can be found until it is taken.",
      "指向一个块或请求，看详情。a₁：a 的，组 1。填色角：被取用之前都找得到。",
    ],
    "pool.hint": [
      "Point at a block or a request. Pale, dashed: reserved, nothing written. ×3: ref_cnt, with the cache.",
      "指向一个块或请求，看详情。浅色虚线框：已预留，还没写入。×3：ref_cnt，含缓存。",
    ],
  });

  Watch.groupWords = ({windows}, group) =>
    Watch.t(windows[group] ? "pool.group.window" : "pool.group", {group, window: windows[group]});

  const join = (parts) => parts.filter(Boolean).join(" · ");

  Watch.blockStateOf = (view, facts, block) => {
    if (block === 0) return "null";
    if (facts.users[block]) return "held";
    const load = facts.loading.get(block);
    if (load) return load[1] ? "held" : "loading";
    const {cached, refCnt, cacheRefs} = view.state;
    if (cached.has(block)) return refCnt[block] > cacheRefs ? "held" : "idle";
    return view.state.refCnt[block] > 0 ? "held" : "free";
  };

  // One sentence about a block: its name for a screen reader, and the first line of the details.
  Watch.describeBlock = (view, facts, block) => {
    const {state, film} = view;
    const kind = Watch.blockStateOf(view, facts, block);
    const cached = state.cached.get(block);
    const users = facts.users[block] ?? [];
    const place = cached?.place ?? facts.places[block];
    const hasGroup = film.run.windows.length > 0 && place >= 0;
    const size = film.run.block_size;
    const taken = facts.nextTaken.indexOf(block) + 1;
    const evicted = facts.nextEvicted.indexOf(block) + 1;
    const changes = (facts.changes.get(block) ?? []).map((change) => Watch.t(`pool.was.${change}`));
    return join([
      Watch.t(`pool.is.${kind}`),
      place >= 0 && Watch.t("pool.positions", {first: place * size, last: (place + 1) * size - 1}),
      hasGroup && Watch.groupWords(film.run, facts.groups[block]),
      users.length || (cached && state.cacheRefs) || facts.loading.has(block) ? holders(view, facts, block) : "",
      cached && kind !== "idle" && Watch.t("pool.published"),
      cached?.blockHash && Watch.t("pool.hash", {hash: cached.blockHash}),
      cached &&
        state.cacheRefs > 0 &&
        (cached.parent === null
          ? Watch.t("pool.no_parent")
          : Watch.t("pool.parent", {parent: cached.parent})),
      taken && Watch.t("pool.nth_taken", {n: taken}),
      evicted && Watch.t("pool.nth_evicted", {n: evicted}),
      changes.length && Watch.t("pool.now", {what: changes.join(", ")}),
    ]);
  };

  function holders(view, facts, block) {
    const who = (facts.users[block] ?? []).map(Watch.label);
    const load = facts.loading.get(block);
    if (load) who.push(Watch.t("pool.a_load", {request: Watch.label(load[0])}));
    if (view.state.cached.has(block) && view.state.cacheRefs) who.push(Watch.t("pool.the_cache"));
    const n = view.state.refCnt[block];
    return Watch.t(n === 1 ? "pool.ref" : "pool.refs", {n, who: who.join(", ")});
  }

  // The block's own facts, and its tokens as text.
  function blockDetails(view, facts, block) {
    const size = view.film.run.block_size;
    const tokens = Watch.blockTokens(view, block);
    const line = h(
      "p",
      {class: "pool-about"},
      h("b", {}, Watch.t("pool.block", {block})),
      " · ",
      Watch.describeBlock(view, facts, block),
    );
    const text = h("p", {class: "pool-tokens"});
    for (const token of tokens)
      text.append(Watch.tokenChip(token.text, token.isWritten ? "" : "is-pending"));
    const numWritten = tokens.filter((token) => token.isWritten).length;
    if (facts.users[block] && numWritten < size) {
      text.append(" ", h("i", {}, Watch.t("pool.written", {n: numWritten, size})));
    }
    return [line, text];
  }

  // A table with a column for each block: the positions, and the block that holds them.
  function tableDetails(view, facts, id) {
    const request = view.state.requests.get(id);
    const name = Watch.label(id);
    if (request === undefined || request.tables.every((table) => table.length === 0)) {
      const absent = view.film.byId.has(id) ? "later" : "elsewhere";
      const why =
        request === undefined ? absent : request.finishReason === null ? "waits" : "ended";
      const values = {request: name, why: Watch.t(`pool.table.${why}`)};
      return [h("p", {class: "pool-about"}, Watch.t("pool.table.none", values))];
    }
    const n = request.table.length;
    const {run} = view.film;
    const key = run.windows.length ? "pool.tables" : n === 1 ? "pool.table.one" : "pool.table";
    const title = h("p", {class: "pool-about"}, h("b", {}, Watch.t(key, {request: name, n})));
    const size = view.film.run.block_size;
    const positions = h("tr", {}, h("th", {scope: "row"}, Watch.t("pool.position")));
    request.table.forEach((_, place) => {
      positions.append(h("td", {}, `${place * size}–${(place + 1) * size - 1}`));
    });
    const rows = request.tables.map((table, group) => {
      const words = run.windows.length ? Watch.groupWords(run, group) : Watch.t("pool.in_block");
      const cells = table.map((block) => tableCell(view, facts, id, block));
      return h("tr", {}, h("th", {scope: "row"}, words), ...cells);
    });
    return [title, h("table", {class: "pool-table"}, positions, ...rows)];
  }

  // An entry: bold where others have the block, too; with groups, marked where it was found.
  function tableCell(view, facts, id, block) {
    if (block === 0) return h("td", {class: "is-given-up", title: Watch.t("pool.given_up")}, "–");
    const others = (facts.users[block] ?? []).filter((other) => other !== id).map(Watch.label);
    const isFound = !view.state.cacheRefs && Watch.matchesOf(view).get(id)?.has(block);
    const title = join([
      isFound && Watch.t("pool.found"),
      others.length && Watch.t("pool.shared_by", {who: others.join(", ")}),
    ]);
    const classes = [others.length && "is-shared", isFound && "is-found"].filter(Boolean).join(" ");
    return h("td", {"data-block": block, class: classes || null, title: title || null}, String(block));
  }

  Watch.poolDetails = (view, facts, {block, request}) => {
    if (block !== null && block < view.state.refCnt.length) return blockDetails(view, facts, block);
    if (request !== null) return tableDetails(view, facts, request);
    const hint = `pool.hint${view.state.cacheRefs ? "" : ".groups"}`;
    return [h("p", {class: "pool-about quiet"}, Watch.t(hint))];
  };
})();
