// Frames: an engine's state as plain JSON, the difference from one to the next, and what happened
// in between. The mirror of common/events/frames.py and workshop/watch/replay/frame_facts.py.
//
// Objects by id have no prototype: a request may be called "constructor". A frame is shared and
// never changed; `apply` makes another one, which has the unchanged parts in common with it.
const F = (Watch.frames = {});
const bare = (entries) => Object.setPrototypeOf(Object.fromEntries(entries), null);

F.isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
F.parse = (text) => JSON.parse(text,
  (_, value) => (F.isObject(value) ? Object.setPrototypeOf(value, null) : value));

F.empty = (run) => {
  const free = Array.from({length: run.num_blocks - 1}, (_, i) => i + 1);
  const byId = ["requests", "computed", "outputs", "pieces", "tables", "refs", "cached",
    "in_flight", "loads", "loaded"].map((name) => [name, bare([])]);
  const lists = ["waiting", "running", "evictable"].map((name) => [name, []]);
  return bare([...byId, ...lists, ["free", free], ["result", null]]);
};

F.apply = (before, changes) => {
  if (Array.isArray(changes)) {
    if (changes.length === 1) return changes[0];
    const removed = new Set(changes[0]);
    const kept = removed.size ? before.filter((item) => !removed.has(item)) : before;
    return kept.concat(changes[1]);
  }
  const after = {__proto__: null, ...before};
  for (const [key, change] of Object.entries(changes)) {
    if (change === null) delete after[key];
    else after[key] = F.apply(after[key], change);
  }
  return after;
};

// -- questions to a frame

// What a frame has of a request; undefined if it has none of this id.
F.request = (frame, id) => frame.requests[id] && {
  ...frame.requests[id], id, outputs: frame.outputs[id], pieces: frame.pieces[id] ?? [],
  numComputed: frame.computed[id], tables: Object.values(frame.tables[id] ?? {}),
};

F.cachedBlocks = (frame) => Object.keys(frame.cached).map(Number);

F.usersOf = (frame, block) => Object.keys(frame.tables)
  .filter((id) => Object.values(frame.tables[id]).some((ids) => ids.includes(block)));

F.evictionOrder = (frame, isGrouped) =>
  (isGrouped ? frame.free.filter((block) => block in frame.cached) : frame.evictable);

// All tokens that a cached block depends on, its own last.
F.prefixOf = (frame, block) => {
  const parts = [];
  for (let place = block; place !== undefined; place = frame.cached[place].parent) {
    parts.push(frame.cached[place].tokens);
  }
  return parts.reverse().flat();
};

// With a radix tree: the blocks of each node, head first.
F.nodes = (frame) => {
  const below = new Map();
  const heads = [];
  for (const [block, row] of Object.entries(frame.cached)) {
    if (row.begins_node) heads.push(Number(block));
    else below.set(row.parent, Number(block));
  }
  return heads.sort((a, b) => a - b).map((head) => {
    const node = [head];
    for (let block; (block = below.get(node.at(-1))) !== undefined; ) node.push(block);
    return node;
  });
};

// A plan by kinds of tokens: [{request, kind, start, numTokens}].
F.cells = (plan, frame) => (plan.requests ?? []).flatMap((id, i) => {
  const cells = [];
  const numDrafts = plan.drafts?.[id]?.length ?? 0;
  let first = plan.starts[i];
  const end = first + plan.num_tokens[i] - numDrafts;
  const bounds = [["recomputed", plan.recomputed?.[id] ?? 0],
    ["prompt", frame.requests[id].prompt.length], ["decode", end]];
  for (const [kind, bound] of bounds) {
    const numTokens = Math.min(Math.max(bound, first), end) - first;
    if (numTokens > 0) cells.push({request: id, kind, start: first, numTokens});
    first += Math.max(0, numTokens);
  }
  if (numDrafts) cells.push({request: id, kind: "draft", start: end, numTokens: numDrafts});
  return cells;
});

// -- what happened between two frames

const isOther = (before, after, id) => before.requests[id]?.number !== after.requests[id]?.number;

F.happened = (before, after) => {
  const step = Object.keys(after.in_flight).find((one) => !(one in before.in_flight));
  const plan = step === undefined ? null : {step: Number(step), ...after.in_flight[step]};
  const result = after.result === before.result ? null : after.result;
  const ids = Object.keys(after.requests)
    .sort((a, b) => after.requests[a].number - after.requests[b].number);
  const preempted = plan?.preempted ?? [];
  const isBack = (id) => preempted.some(([one]) => one === id) ||
    before.requests[id]?.num_preemptions > 0;
  return {
    arrived: ids.filter((id) => isOther(before, after, id)),
    finished: ids.filter((id) => after.requests[id].finish &&
      (isOther(before, after, id) || !before.requests[id].finish)),
    admitted: (plan?.admitted ?? []).map(([id, num]) => [id, num, isBack(id)]),
    preempted,
    plan,
    result,
    tokens: result ? newTokens(before, after) : bare([]),
    ...tablesThatChanged(before, after),
    ...cacheThatChanged(before, after),
    loads_begun: Object.keys(after.loads).filter((id) => !(id in before.loads)),
    loads_ended: Object.keys(before.loads).filter((id) => !(id in after.loads)),
  };
};

function newTokens(before, after) {
  const num = (id) => (isOther(before, after, id) ? 0 : before.outputs[id].length);
  return bare(Object.entries(after.outputs).map(([id, ids]) => [id, ids.slice(num(id))])
    .filter(([, ids]) => ids.length));
}

const isSame = (a, b) => a === b || JSON.stringify(a) === JSON.stringify(b);

function tablesThatChanged(before, after) {
  const found = {taken: bare([]), shared: bare([]), freed: bare([]), known: []};
  const isShared = (block) => before.cached[block] !== undefined
    && isSame(before.cached[block], after.cached[block]);
  if (before.tables === after.tables) return found;
  for (const id of Object.keys({...before.tables, ...after.tables})) {
    const [was, now] = [before.tables[id] ?? {}, after.tables[id] ?? {}];
    if (was === now) continue;
    for (const group of Object.keys({...was, ...now})) {
      const [old, held] = [was[group] ?? [], now[group] ?? []];
      const replaced = new Map();
      old.forEach((block, i) => {
        if (block && held[i] && held[i] !== block) replaced.set(held[i], block);
      });
      for (const [kept, given] of replaced) found.known.push([id, given, kept]);
      const [before_, after_] = [new Set(old), new Set([...held, ...replaced.values()])];
      const added = held.filter((block) => block && !before_.has(block) && !replaced.has(block));
      const kinds = [["taken", added.filter((block) => !isShared(block))],
        ["shared", added.filter(isShared)],
        ["freed", old.filter((block) => block && !after_.has(block))]];
      for (const [kind, blocks] of kinds) {
        if (blocks.length) (found[kind][id] ??= []).push(...blocks);
      }
    }
  }
  return found;
}

// As they are in `order`; others come last, by id.
function sortAs(blocks, order) {
  const place = new Map(order.map((block, i) => [block, i]));
  const rank = (block) => place.get(block) ?? order.length;
  blocks.sort((a, b) => rank(a) - rank(b) || a - b);
}

function cacheThatChanged(before, after) {
  const published = bare([]);
  const split = [];
  if (before.cached === after.cached) return {published, evicted: [], split};
  const evicted = F.cachedBlocks(before).filter((block) => !(block in after.cached));
  for (const [block, row] of Object.entries(after.cached)) {
    const old = before.cached[block];
    if (old !== undefined && isSame(old, row)) continue;
    if (old !== undefined && isSame({...old, begins_node: true}, row)) {
      split.push(Number(block));
      continue;
    }
    if (old !== undefined) evicted.push(Number(block));
    (published[row.by ?? ""] ??= []).push(Number(block));
  }
  for (const [id, blocks] of Object.entries(published)) {
    sortAs(blocks, Object.values(before.tables[id] ?? {}).flat());
  }
  if (evicted.length) sortAs(evicted, before.evictable);
  return {published, evicted, split};
}
