// What a cell of the pool says, before anything is drawn: whose it is, how often it is held, its
// place in the orders, and what the step did to it.
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
