// What there is to say of every block after a step: whose it is, which place of a table, what
// happened to it. The pool and the prefix cache show the same facts.
const F = Watch.frames;
const NUM_NEXT = 6; // blocks of the free order and of the order of eviction that get a number

// Of one block several things may happen in a step; the last of these is what its outline says.
const CHANGES = ["freed", "evicted", "published", "shared", "taken", "loaded"];

// What happened to which blocks in a step: Map(block -> [kinds], in the order of CHANGES).
function changesOf(frames) {
  const changes = new Map();
  const note = (kind, blocks) => {
    for (const block of blocks) changes.set(block, (changes.get(block) ?? new Set()).add(kind));
  };
  for (const what of frames) {
    for (const kind of ["taken", "shared", "freed"]) note(kind, Object.values(what[kind]).flat());
    for (const [, blocks] of what.published) note("published", blocks);
    note("evicted", what.evicted);
    for (const [, given, kept] of what.known) {
      note("freed", [given]);
      note("shared", [kept]);
    }
    for (const [, blocks] of what.begun) note("taken", blocks);
    for (const [, blocks] of what.loaded) note("loaded", blocks);
  }
  const inOrder = (kinds) => CHANGES.filter((kind) => kinds.has(kind));
  return new Map([...changes].map(([block, kinds]) => [block, inOrder(kinds)]));
}

Watch.blockFacts = Watch.ofStep(({film, state, facts}) => {
  const num = film.run.num_blocks;
  const users = new Array(num).fill(null);
  const places = new Array(num).fill(-1); // the same in every table: a block stands for a prefix
  const groups = new Array(num).fill(0); // of layers, whose KV is in it
  for (const [block, {group}] of Object.entries(state.cached)) groups[block] = group ?? 0;
  for (const id of state.running) { // only who runs has a table
    for (const [group, table] of Object.entries(state.tables[id] ?? {})) {
      table.forEach((block, place) => {
        if (block === 0) return; // given up
        (users[block] ??= []).push(id);
        places[block] = place;
        groups[block] = Number(group);
      });
    }
  }
  const loading = new Map(Object.entries(state.loads).flatMap(([id, load]) => // has it arrived
    load.blocks.map((block) => [block, [id, load.has_arrived]])));
  const evictable = F.evictionOrder(state, !film.cacheRefs);
  return {
    users, places, groups, loading, evictable,
    nextTaken: state.free.slice(0, NUM_NEXT),
    nextEvicted: film.cacheRefs ? evictable.slice(0, NUM_NEXT) : [], // else it is the free order
    changes: changesOf(facts?.frames ?? []),
    numFree: state.free.length - (film.cacheRefs ? 0 : evictable.length),
  };
});

// The tokens of a block, as text: [{text, isWritten}]. A block that is not full yet has room.
Watch.blockTokens = (view, block) => {
  const {film, state} = view;
  const size = film.run.block_size;
  const {users, places} = Watch.blockFacts(view);
  if (users[block] === null) {
    const tokens = state.cached[block]?.tokens ?? [];
    return tokens.map((token) => ({text: Watch.pieceOf(film, token), isWritten: true}));
  }
  const request = view.request(users[block][0]);
  const start = places[block] * size;
  const end = Math.min(start + size, request.prompt.length + request.outputs.length);
  return Array.from({length: Math.max(0, end - start)}, (_, i) => ({
    text: Watch.pieceAt(film, request, start + i), isWritten: start + i < request.numComputed}));
};
