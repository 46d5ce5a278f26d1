// What is known of a block: in its cell, in a sentence, and below the pool, where the table of a
// request may stand, too.
const {h, t} = Watch;
Watch.words({
  "pool.block": ["Block {block}", "块 {block}"],
  "pool.is.null": ["the null block: never allocated, padding points to it", "空块：从不分配，填充位置都指向它"],
  "pool.is.free": ["free", "空闲"],
  "pool.is.held": ["in use", "使用中"],
  "pool.is.idle": ["cached, and no request uses it", "在缓存里，没有请求使用"],
  "pool.is.loading": ["KV is being loaded into it", "正在把 KV 加载进来"],
  "pool.refs": ["{n} references: {who}", "引用计数 {n}：{who}"],
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
  "pool.table.none": ["{request} has no block table: it {why}.", "{request} 没有块表：它{why}。"],
  "pool.table.waits": ["waits", "在排队"],
  "pool.position": ["position", "位置"],
  "pool.in_block": ["block", "块"],
  "pool.group": ["group {group}, sees all", "组 {group}，看到全部"],
  "pool.group.window": ["group {group}, window {window}", "组 {group}，窗口 {window}"],
  "pool.tables": ["Block tables of {request}, one for each group of layers",
    "{request} 的块表，每组层一张"],
  "pool.given_up": ["given up: no token to come sees it", "已交还：之后的 token 都看不到它"],
  "pool.found": ["found in the cache in this step", "本步在缓存里找到"],
  "pool.shared_by": ["also {who}", "同用：{who}"],
  "pool.hint.groups": [
    "Point at a block or a request. a₁: of a, group 1. Filled corner: can be found until it is taken.",
    "指向一个块或请求，看详情。a₁：a 的，组 1。填色角：被取用之前都找得到。"],
  "pool.hint": [
    "Point at a block or a request. Pale, dashed: reserved, nothing written. ×3: ref_cnt, with the cache.",
    "指向一个块或请求，看详情。浅色虚线框：已预留，还没写入。×3：ref_cnt，含缓存。"],
});

Watch.groupWords = ({windows}, group) =>
  t(windows[group] ? "pool.group.window" : "pool.group", {group, window: windows[group]});

Watch.blockStateOf = ({film, state}, facts, block) => {
  if (block === 0) return "null";
  if (facts.users[block]) return "held";
  const load = facts.loading.get(block);
  if (load) return load[1] ? "held" : "loading";
  const refs = state.refs[block] ?? 0;
  if (block in state.cached) return refs > film.cacheRefs ? "held" : "idle";
  return refs > 0 ? "held" : "free";
};

// One sentence about a block: its name for a screen reader, and the first line of the details.
Watch.describeBlock = (view, facts, block) => {
  const {state, film} = view;
  const kind = Watch.blockStateOf(view, facts, block);
  const cached = state.cached[block];
  const parent = cached?.parent ?? null;
  const isHeld = facts.users[block] || (cached && film.cacheRefs) || facts.loading.has(block);
  const place = cached?.place ?? facts.places[block];
  const hasGroup = film.run.windows.length > 0 && place >= 0;
  const size = film.run.block_size;
  const taken = facts.nextTaken.indexOf(block) + 1;
  const evicted = facts.nextEvicted.indexOf(block) + 1;
  const changes = (facts.changes.get(block) ?? []).map((change) => t(`pool.was.${change}`));
  return Watch.joined(
    t(`pool.is.${kind}`),
    place >= 0 && t("pool.positions", {first: place * size, last: (place + 1) * size - 1}),
    hasGroup && Watch.groupWords(film.run, facts.groups[block]),
    isHeld && holders(view, facts, block),
    cached && kind !== "idle" && t("pool.published"),
    cached?.hash && t("pool.hash", {hash: cached.hash}),
    cached && film.cacheRefs && t(parent === null ? "pool.no_parent" : "pool.parent", {parent}),
    taken && t("pool.nth_taken", {n: taken}),
    evicted && t("pool.nth_evicted", {n: evicted}),
    changes.length && t("pool.now", {what: changes.join(", ")}),
  );
};

function holders({film, state}, facts, block) {
  const who = (facts.users[block] ?? []).map(Watch.label);
  const load = facts.loading.get(block);
  if (load) who.push(t("pool.a_load", {request: Watch.label(load[0])}));
  if (block in state.cached && film.cacheRefs) who.push(t("words.cache"));
  const n = state.refs[block] ?? 0;
  return t("pool.refs", {n, who: who.join(", ")});
}

// The block's own facts, and its tokens as text.
function blockDetails(view, facts, block) {
  const size = view.film.run.block_size;
  const tokens = Watch.blockTokens(view, block);
  const name = h("b", {}, t("pool.block", {block}));
  const line = h("p", {class: "pool-about"},
    name, " · ", Watch.describeBlock(view, facts, block));
  const text = Watch.tokenLine(tokens);
  const numWritten = tokens.filter((token) => token.isWritten).length;
  if (facts.users[block] && numWritten < size) {
    text.append(" ", h("i", {}, t("pool.written", {n: numWritten, size})));
  }
  return [line, text];
}

// A table with a column for each block: the positions, and the block that holds them.
function tableDetails(view, facts, id) {
  const request = view.request(id);
  const name = Watch.label(id);
  if (request === undefined || request.tables.every((table) => table.length === 0)) {
    const absent = view.film.byId.has(id) ? "cell.before" : "cell.elsewhere";
    const held = request?.finish ? "fact.ended" : "pool.table.waits";
    const values = {request: name, why: t(request === undefined ? absent : held)};
    return [h("p", {class: "pool-about"}, t("pool.table.none", values))];
  }
  const {run} = view.film;
  const [first] = request.tables;
  const n = first.length;
  const key = run.windows.length ? "pool.tables" : "pool.table";
  const title = h("p", {class: "pool-about"}, h("b", {}, t(key, {request: name, n})));
  const size = run.block_size;
  const positions = h("tr", {}, h("th", {scope: "row"}, t("pool.position")),
    ...first.map((_, place) => h("td", {}, `${place * size}–${(place + 1) * size - 1}`)));
  const rows = request.tables.map((table, group) => {
    const words = run.windows.length ? Watch.groupWords(run, group) : t("pool.in_block");
    const cells = table.map((block) => tableCell(view, facts, id, block));
    return h("tr", {}, h("th", {scope: "row"}, words), ...cells);
  });
  return [title, h("table", {class: "pool-table"}, positions, ...rows)];
}

// An entry: bold where others have the block, too; with groups, marked where it was found.
function tableCell(view, facts, id, block) {
  if (block === 0) return h("td", {class: "is-given-up", title: t("pool.given_up")}, "–");
  const others = (facts.users[block] ?? []).filter((other) => other !== id).map(Watch.label);
  const isFound = !view.film.cacheRefs && Watch.matchesOf(view).get(id)?.has(block);
  const shared = others.length && t("pool.shared_by", {who: others.join(", ")});
  const title = Watch.joined(isFound && t("pool.found"), shared);
  const classes = [others.length && "is-shared", isFound && "is-found"].filter(Boolean).join(" ");
  const attributes = {"data-block": block, class: classes || null, title: title || null};
  return h("td", attributes, String(block));
}

Watch.poolDetails = (view, facts, {block, request}, numDrawn) => {
  const {num_blocks: num, block_size: size} = view.film.run;
  if (block !== null && block < num) return blockDetails(view, facts, block);
  if (request !== null) return tableDetails(view, facts, request);
  const number = (n) => n.toLocaleString("en");
  const values = {all: number(num - 1), size, tokens: number((num - 1) * size)};
  const isAboutAll = block === null && numDrawn < num;
  const key = isAboutAll ? "pool.large" : `pool.hint${view.film.cacheRefs ? "" : ".groups"}`;
  return [h("p", {class: "pool-about quiet"}, t(key, values))];
};

// -- what a cell of the pool says, before anything is drawn: whose it is, how often it is held, its
// place in the orders, and what the step did to it

const MOST_OWNERS = 3; // colours in a cell
const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";

// `looked`: `lit`, the places of the request's table that is looked at, or null; the `block` that
// is; the `cursor` of the keyboard; the `order` numbers; and whether cells have room for labels.
Watch.poolLook = (view, facts, block, looked) => {
  const {film: {cacheRefs}, state} = view;
  const {lit, order, cursor} = looked;
  const users = facts.users[block] ?? [];
  const load = facts.loading.get(block);
  const isDim = lit !== null && !lit.has(block);
  return {
    state: Watch.blockStateOf(view, facts, block),
    owners: users.length ? users.slice(0, MOST_OWNERS) : load ? [load[0]] : [],
    label: isDim || !looked.hasLabels ? ""
      : labelOf(block, users, load, lit) + groupOf(view, facts, block),
    refs: isDim ? 0 : state.refs[block] ?? 0, // no words in a pale cell
    order: isDim ? "" : (order.get(block) ?? ""),
    change: facts.changes.get(block)?.at(-1) ?? null,
    isEmpty: users.length > 0 && isReserved(view, users, facts.places[block]),
    isPublished: block in state.cached && state.refs[block] > cacheRefs,
    isDim,
    isLit: lit !== null ? !isDim : looked.block === block,
    isCursor: cursor === block,
  };
};

// Nobody has written into it yet: a scheduler that reserves at admission takes such blocks.
function isReserved({film, state}, users, place) {
  const first = place * film.run.block_size;
  return users.every((id) => state.computed[id] <= first);
}

// Whose layers' KV is in it, if there are groups of them.
function groupOf({film, state}, facts, block) {
  const isOwned = facts.users[block] !== null || block in state.cached;
  return film.cacheRefs || !isOwned ? "" : SUBSCRIPTS[facts.groups[block]];
}

// Of a request that is looked at, the place in its table; else whose it is: "a", or "a+2".
function labelOf(block, users, load, lit) {
  if (block === 0) return "∅";
  if (lit !== null) return lit.get(block);
  if (users.length > 1) return `${Watch.label(users[0])}+${users.length - 1}`;
  const owner = users[0] ?? load?.[0];
  return owner === undefined ? "" : Watch.label(owner);
}
