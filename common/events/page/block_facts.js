"use strict";
// What there is to say of every block after a step: whose it is, which place of a table, what
// happened to it. The pool and the prefix cache show the same facts.
(() => {
  const NUM_NEXT = 6; // blocks of the free order and of the order of eviction that get a number

  // Of one block several things may happen in a step; the last of these is what its outline says.
  const CHANGES = ["freed", "evicted", "published", "shared", "taken", "loaded"];

  const last = new WeakMap(); // film -> the facts of the step that was asked for last

  // Which blocks each event of a step concerned: Map(block -> [kinds], in the order of CHANGES).
  function changesOf(events) {
    const changes = new Map();
    const note = (kind, blocks) => {
      for (const block of blocks) {
        if (!changes.has(block)) changes.set(block, new Set());
        changes.get(block).add(kind);
      }
    };
    for (const event of events) {
      if (event.kind === "published") {
        note(
          "published",
          event.kept.filter((kept, i) => kept === event.given[i]),
        );
        note(
          "shared",
          event.kept.filter((kept, i) => kept !== event.given[i]),
        );
        note(
          "freed",
          event.given.filter((given, i) => given !== event.kept[i]),
        );
      } else if (CHANGES.includes(event.kind)) {
        note(event.kind, event.blocks);
      }
    }
    for (const [block, kinds] of changes) {
      changes.set(
        block,
        CHANGES.filter((kind) => kinds.has(kind)),
      );
    }
    return changes;
  }

  function make(view) {
    const {state} = view;
    const num = state.refCnt.length;
    const users = new Array(num).fill(null);
    const places = new Array(num).fill(-1); // the same in every table: a block stands for a prefix
    const groups = new Array(num).fill(0); // of layers, whose KV is in it
    for (const [block, {group}] of state.cached) groups[block] = group ?? 0;
    for (const id of state.running) {
      // only who runs has a table
      state.request(id).tables.forEach((table, group) => {
        table.forEach((block, place) => {
          if (block === 0) return; // given up
          (users[block] ??= []).push(id);
          places[block] = place;
          groups[block] = group;
        });
      });
    }
    const loading = new Map(); // block -> [request, has it arrived]
    for (const [id, load] of state.loads) {
      for (const block of load.blocks) loading.set(block, [id, load.hasArrived]);
    }
    const nextTaken = [];
    for (const block of state.free) {
      if (nextTaken.length === NUM_NEXT) break;
      nextTaken.push(block);
    }
    const evictable = state.evictionOrder();
    const events = view.facts?.events ?? [];
    return {
      users,
      places,
      groups,
      loading,
      nextTaken,
      evictable,
      nextEvicted: state.cacheRefs ? evictable.slice(0, NUM_NEXT) : [], // else it is the free order
      changes: changesOf(events),
      numFree: state.free.size - (state.cacheRefs ? 0 : evictable.length),
    };
  }

  Watch.blockFacts = (view) => {
    const known = last.get(view.film);
    if (known?.step === view.step) return known.facts;
    const facts = make(view);
    last.set(view.film, {step: view.step, facts});
    return facts;
  };
  Watch.blockChanges = CHANGES;

  // The tokens of a block, as text: [{text, isWritten}]. A block that is not full yet has room.
  Watch.blockTokens = (view, block) => {
    const {film, state} = view;
    const size = film.run.block_size;
    const facts = Watch.blockFacts(view);
    const [user] = facts.users[block] ?? [];
    if (user !== undefined) {
      const request = state.request(user);
      const start = facts.places[block] * size;
      const end = Math.min(start + size, request.prompt.length + request.outputs.length);
      const tokens = [];
      for (let position = start; position < end; position++) {
        const isWritten = position < request.numComputedTokens;
        tokens.push({text: Watch.pieceAt(film, request, position), isWritten});
      }
      return tokens;
    }
    const cached = state.cached.get(block);
    const tokens = cached === undefined ? [] : cached.tokens;
    return tokens.map((token) => ({text: Watch.pieceOf(film, token), isWritten: true}));
  };
})();
