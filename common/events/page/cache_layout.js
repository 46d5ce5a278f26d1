// Where the blocks of the prefix cache stand on the page. A cached block keeps its place for as
// long as it lives, however one jumps through the film: places are given once, for the whole film.
//
//   column    how many blocks stand before it in its prefix
//   lane      that of its parent, if it comes right behind it; else the first that nobody lives in
//
//   lane 0    [1][2][3][4]          A lane holds one chain without gaps: what is evicted first is
//   lane 1          '-[7][8]        the end of it. So a lane is empty when all of it is gone.
const F = Watch.frames;
const BEFORE = -2; // all steps, and the state before the first of them

class Layout {
  constructor(film) {
    this.livesOf = new Map(); // block -> its lives: {block, lane, column, parent, born, died}
    this.diedIn = new Map(); // step -> the lives that ended in it
    this.lanes = []; // the living of each lane, in the order of columns
    this.numColumns = 0;
    this.living = new Map(); // block -> its life
    for (const step of [...film.steps, film.open]) {
      for (const what of step.frames) this.note(what, step.number);
    }
  }

  note({at, line, published, evicted, parents}, number) {
    for (const block of evicted) this.end(block, number);
    const rows = line.changes.cached ?? {};
    const order = at === "start" ? Object.keys(rows).map(Number)
      : published.flatMap(([, blocks]) => blocks);
    const parentOf = (block) => parents.get(block) ?? rows[block][0].parent ?? null;
    for (const block of order) this.publish(block, rows, parentOf, at === "start" ? BEFORE : number);
  }

  // Its parents first.
  publish(block, rows, parentOf, number) {
    if (this.living.has(block) || !Array.isArray(rows[block])) return;
    const [{place, group = 0}] = rows[block];
    const parent = parentOf(block);
    if (parent !== null) this.publish(parent, rows, parentOf, number);
    const before = this.living.get(parent) ?? null;
    this.begin(block, before, number, place ?? (before === null ? 0 : before.column + 1), group);
  }

  // With groups a parent may be gone before its child, and `place` alone says where that stands.
  begin(block, parent, born, column, group) {
    const goesOn = parent !== null && this.lanes[parent.lane].at(-1) === parent;
    const lane = goesOn ? parent.lane : this.emptyLane();
    const life = {block, parent, lane, column, group, born, died: null};
    this.lanes[lane].push(life);
    this.living.set(block, life);
    this.livesOf.set(block, [...(this.livesOf.get(block) ?? []), life]);
    this.numColumns = Math.max(this.numColumns, column + 1);
  }

  emptyLane() {
    const lane = this.lanes.findIndex((living) => living.length === 0);
    return lane >= 0 ? lane : this.lanes.push([]) - 1;
  }

  end(block, number) {
    const life = this.living.get(block);
    if (life === undefined) return; // a film that contradicts itself
    life.died = number;
    this.living.delete(block);
    this.lanes[life.lane] = this.lanes[life.lane].filter((other) => other !== life);
    this.diedIn.set(number, [...(this.diedIn.get(number) ?? []), life]);
  }

  // The life of a block that is cached after a step.
  lifeAt(block, step) {
    return this.livesOf.get(block)
      ?.findLast(({born, died}) => born <= step && (died === null || died > step)) ?? null;
  }
}

Watch.cacheLayout = Watch.ofFilm((film) => new Layout(film));

// What is drawn of a step: a box for each block of a chain, or for each node of a radix tree, and
// for what was evicted in it: {blocks, lane, column, parent, isGone, matched, numNew, isSplit}.
Watch.cacheBoxes = ({film, state, step, facts}) => {
  const layout = Watch.cacheLayout(film);
  const isTree = film.run.prefix_cache === "radix";
  const nodes = isTree ? F.nodes(state) : F.cachedBlocks(state).map((block) => [block]);
  const splits = new Set((facts?.frames ?? []).flatMap(({split}) => split));
  const matched = [...Watch.matchesOf({facts})];
  const boxes = nodes.map((blocks) => ({life: layout.lifeAt(blocks[0], step), blocks}))
    .filter(({life}) => life !== null).map(({life, blocks}) => ({
      ...life, blocks, isGone: false,
      matched: matched.filter(([, found]) => found.has(blocks[0])).map(([id]) => id),
      numNew: blocks.filter((block) => layout.lifeAt(block, step)?.born === step).length,
      isSplit: splits.has(blocks[0]),
    }));
  const gone = (layout.diedIn.get(step) ?? []).map((life) =>
    ({...life, blocks: [life.block], isGone: true, matched: [], numNew: 0, isSplit: false}));
  return [...boxes, ...gone];
};

// The look-ups of a step: request -> the blocks that were found for it.
Watch.matchesOf = ({facts}) => new Map((facts?.frames ?? []).flatMap(({hits}) =>
  [...hits].map(([id, blocks]) => [id, new Set(blocks)])));
