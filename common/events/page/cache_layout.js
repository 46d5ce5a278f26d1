"use strict";
// Where the blocks of the prefix cache stand on the page. A cached block keeps its place for as long
// as it lives, however one jumps through the film: places are given once, for the whole film.
//
//   column    how many blocks stand before it in its prefix
//   lane      that of its parent, if it comes right behind it; else the first that nobody lives in
//
//   lane 0    [1][2][3][4]          A lane holds one chain without gaps: what is evicted first is
//   lane 1          '-[7][8]        the end of it. So a lane is empty again when all of it is gone.
(() => {
  const BEFORE = -2; // all steps, and the state before the first of them

  class Layout {
    constructor(film) {
      this.livesOf = new Map(); // block -> its lives: {block, lane, column, parent, born, died}
      this.diedIn = new Map(); // step -> the lives that ended in it
      this.lanes = []; // the living of each lane, in the order of columns
      this.numColumns = 0;
      this.tables = new Map(); // request -> its block tables, or what a load goes on behind
      this.living = new Map(); // block -> its life
      film.steps.forEach((step, number) => {
        for (const event of step.events) this.note(event, number);
      });
      // A film without steps may have a snapshot.
      for (const event of film.open.events) this.note(event, film.numSteps);
    }

    note(event, number) {
      if (event.kind === "table") {
        const tables = [...(this.tables.get(event.request) ?? [])];
        tables[event.group] = (tables[event.group] ?? []).slice(0, event.keep).concat(event.blocks);
        this.tables.set(event.request, tables);
      } else if (event.kind === "load_begun") {
        this.tables.set(event.request, [event.prefix]);
      } else if (event.kind === "published") {
        this.publish(event, number);
      } else if (event.kind === "evicted") {
        for (const block of event.blocks) this.end(block, number);
      } else if (event.kind === "snapshot") {
        for (const {request, table, tables = []} of event.requests)
          this.tables.set(request, [table, ...tables]);
        const rows = new Map(event.cached.map((row) => [row.block, row]));
        for (const block of rows.keys()) this.restore(block, rows);
      }
    }

    // What was cached before the film began, its parents first.
    restore(block, rows) {
      const path = [];
      for (let at = block; rows.has(at) && !this.living.has(at); at = rows.get(at).parent)
        path.push(at);
      for (const at of path.reverse())
        this.restored(rows.get(at));
    }

    restored({block, parent: before, place, group}) {
      const parent = this.living.get(before) ?? null;
      this.begin(block, parent, BEFORE, place ?? (parent === null ? 0 : parent.column + 1), group);
    }

    // Behind the block that stands before `start` in the request's table; each before the next.
    publish(event, number) {
      const {start, group} = event;
      const before = start ? this.tables.get(event.request)?.[group]?.[start - 1] : undefined;
      let parent = this.living.get(before) ?? null;
      event.kept.forEach((block, i) => {
        if (block === event.given[i]) this.begin(block, parent, number, start + i, group);
        parent = this.living.get(block) ?? null;
      });
    }

    // With groups a parent may be gone before its child, and `place` alone says where that stands.
    begin(block, parent, number, place, group = 0) {
      const goesOn = parent !== null && this.lanes[parent.lane].at(-1) === parent;
      const lane = goesOn ? parent.lane : this.emptyLane();
      const life = {
        block,
        parent,
        lane,
        column: place,
        group,
        born: number,
        died: null,
      };
      this.lanes[lane].push(life);
      this.living.set(block, life);
      if (!this.livesOf.has(block)) this.livesOf.set(block, []);
      this.livesOf.get(block).push(life);
      this.numColumns = Math.max(this.numColumns, life.column + 1);
    }

    emptyLane() {
      const lane = this.lanes.findIndex((living) => living.length === 0);
      if (lane >= 0) return lane;
      this.lanes.push([]);
      return this.lanes.length - 1;
    }

    end(block, number) {
      const life = this.living.get(block);
      if (life === undefined) return; // a film that contradicts itself
      life.died = number;
      this.living.delete(block);
      this.lanes[life.lane] = this.lanes[life.lane].filter((other) => other !== life);
      if (!this.diedIn.has(number)) this.diedIn.set(number, []);
      this.diedIn.get(number).push(life);
    }

    // The life of a block that is cached after a step.
    lifeAt(block, step) {
      const lives = this.livesOf.get(block) ?? [];
      return (
        lives.findLast((life) => life.born <= step && (life.died === null || life.died > step)) ??
        null
      );
    }
  }

  const layouts = new WeakMap();
  Watch.cacheLayout = (film) => {
    if (!layouts.has(film)) layouts.set(film, new Layout(film));
    return layouts.get(film);
  };

  // What is drawn of a step: a box for each block of a chain, or for each node of a radix tree, and
  // for what was evicted in it: {blocks, lane, column, parent, isGone, matched, isNew, isSplit}.
  Watch.cacheBoxes = (view) => {
    const {film, state, step} = view;
    const layout = Watch.cacheLayout(film);
    const isTree = film.run.prefix_cache === "radix";
    const groups = isTree ? state.nodes() : [...state.cached.keys()].map((block) => [block]);
    const events = view.facts?.events ?? [];
    const splits = new Set(events.filter(({kind}) => kind === "split").map(({block}) => block));
    const matched = Watch.matchesOf(view);
    const boxes = groups.map((blocks) => {
      const life = layout.lifeAt(blocks[0], step);
      if (life === null) return null;
      const by = [...matched].filter(([, found]) => found.has(blocks[0])).map(([id]) => id);
      return {
        blocks,
        lane: life.lane,
        column: life.column,
        group: life.group,
        parent: life.parent,
        isGone: false,
        matched: by,
        numNew: blocks.filter((block) => layout.lifeAt(block, step)?.born === step).length,
        isSplit: splits.has(blocks[0]),
      };
    });
    const gone = (layout.diedIn.get(step) ?? []).map(({block, lane, column, group, parent}) => ({
      blocks: [block],
      lane,
      column,
      group,
      parent,
      isGone: true,
      matched: [],
      numNew: 0,
      isSplit: false,
    }));
    return [...boxes.filter(Boolean), ...gone];
  };

  // The look-ups of a step: request -> the blocks that were found for it.
  Watch.matchesOf = (view) => {
    const matches = new Map();
    for (const event of view.facts?.events ?? []) {
      if (event.kind !== "matched" || event.request === null) continue;
      const before = event.group ? matches.get(event.request) : [];
      matches.set(event.request, new Set([...(before ?? []), ...event.blocks]));
    }
    return matches;
  };
})();
