// The film of a run: its lines, read as frames (frames.js), what each step did, and the frame
// after any of them.
//
// A film that contradicts itself (a broken engine may write such) ends there, and says so:
// `film.contradiction` is null or {step, message}, and the last step is the one that it broke.
//
// A film may go on: `film.with(lines)` is the longer one. They share what both have; the shorter
// one is not to be used any more.
const F = Watch.frames;
Watch.words({
  "line.at": ["Line {line}: {problem}", "第 {line} 行：{problem}"],
  "line.none": ["The file has no run line.", "文件里没有 run 行。"],
  "line.no_json": ["this is no JSON object.", "不是 JSON 对象。"],
  "line.no_frame": ["this is no frame.", "不是一帧。"],
  "line.version": ["the run is of version {version}; this page reads version {known}.",
    "记录格式是第 {version} 版，本页只能读第 {known} 版。"],
  "line.run": ["the run line is the first, and the only one.", "run 行必须是第一行，而且只能有一行。"],
  "wrong.not_running": ["step {step} computes “{request}”, which does not run",
    "第 {step} 步计算“{request}”，但它没有在运行"],
  "wrong.start": ["“{request}” goes on at {start}, and {computed} are computed",
    "“{request}”从 {start} 继续，而算好的有 {computed} 个"],
  "wrong.free": ["block {block} is free and held", "块 {block} 既空闲又有人持有"],
});

// -- lines

Watch.LineError = class extends Error {};
const MOMENTS = ["start", "between", "plan", "result", "failed"];

// `number` is that of a line in a file; of a film that goes on, a line has none.
Watch.parseLine = (text, number = null) => {
  const fail = (key, values) => {
    const problem = Watch.t(`line.${key}`, values);
    throw new Watch.LineError(number ? Watch.t("line.at", {line: number, problem}) : problem);
  };
  let line = null;
  try {
    line = F.parse(text);
  } catch {
    fail("no_json");
  }
  if (!F.isObject(line)) fail("no_json");
  const {kind, version, at, changes} = line;
  const known = Watch.settings.version;
  if (number && (kind === "run") !== (number === 1)) fail("run");
  if (kind === "run" && version !== known) fail("version", {version, known});
  if (kind === "run") return {...line, windows: line.windows ?? []};
  if (!MOMENTS.includes(at) || !F.isObject(changes)) fail("no_frame");
  return line;
};

// What is behind the last line break was cut by a crash, and is left out.
Watch.parseLines = (text) => {
  const lines = text.split("\n").slice(0, -1);
  if (!lines.length) throw new Watch.LineError(Watch.t("line.none"));
  return lines.map((line, index) => Watch.parseLine(line, index + 1));
};

// -- the film

const KEPT_EVERY = 32; // lines; a jump applies at most so many
const NUM_RECENT = 16; // frames that were asked for last, kept

const none = Object.freeze(Object.create(null));
const NO_PLAN = {
  requests: [], starts: [], num_tokens: [], drafts: none, recomputed: none, admitted: [],
  preempted: [], skipped: none, parents: none, stop: null,
};
const NO_RESULT = {times: none, verified: none, discarded: none};
const newStep = (number, first) => ({
  number, first, end: first, frames: [], plan: null, plans: [], result: null, error: null,
  tokens: none, cells: new Map(), idle: [], waiting: [], marks: new Map(),
});

Watch.Film = class Film {
  constructor([run, ...lines]) {
    this.run = run;
    this.cacheRefs = run.windows.length ? 0 : 1; // that the cache has on each of its blocks
    this.lines = [];
    this.steps = [];
    this.byId = new Map(); // request id -> what there is to know of it, in order of arrival
    this.contradiction = null;
    this.planned = new Map(); // step of a plan -> it, its cells, who waited, who ran without
    this.now = F.empty(run); // after all lines, also those behind the last step
    this.kept = [this.now]; // behind each 32nd line
    this.recent = new Map(); // number of lines -> the frame behind them
    this.open = newStep(0, 0);
    this.read(lines);
  }

  // Another object, so that whoever keeps what it worked out of a film sees that there is more.
  with(lines) {
    const film = Object.assign(Object.create(Film.prototype), this);
    film.read(lines);
    return film;
  }

  get numSteps() {
    return this.steps.length;
  }

  get requests() {
    return [...this.byId.values()];
  }

  // One pass, which finds contradictions, too.
  read(lines) {
    if (this.contradiction) return;
    for (const line of lines) {
      const step = this.open;
      let after = null;
      try {
        after = F.apply(this.now, line.changes);
        step.frames.push(this.note(step, line, after));
      } catch (error) {
        this.contradiction = {step: step.number, message: error.message};
        this.steps.push(step);
        return;
      }
      this.now = after;
      step.end = this.lines.push(line);
      if (step.end % KEPT_EVERY === 0) this.kept.push(after);
      if (step.result || step.error !== null) {
        this.steps.push(step);
        this.open = newStep(step.number + 1, step.end);
      }
    }
    // Arrivals and aborts behind the last step belong to no step; those requests are known.
    this.isCut = this.open.plans.length > 0;
  }

  // What a line says of its step, before the frame behind it becomes `now`.
  note(step, line, after) {
    const {at} = line;
    const before = at === "start" ? after : this.now; // what was there has not happened
    const arrive = (id) => this.noteArrival(after.requests[id], id, step.number);
    if (at === "start") Object.keys(after.requests).forEach(arrive);
    const what = {at, line, hits: new Map(), ...F.happened(before, after)};
    Object.assign(what, loadsOf(what, before, after));
    what.published = Object.entries(what.published); // by the request
    what.parents = parentsOf(what.published, before, after);
    const mark = (id, name) => step.marks.set(id, [...(step.marks.get(id) ?? []), name]);
    for (const id of what.arrived) {
      arrive(id);
      mark(id, "arrived");
    }
    for (const [id] of what.preempted) mark(id, "preempted");
    for (const [id, , isBack] of what.admitted) mark(id, isBack ? "returned" : "admitted");
    for (const id of what.finished) {
      const ended = {end: step.number, request: F.request(after, id)};
      Object.assign(this.byId.get(id).lives.at(-1), ended);
      mark(id, "finished");
    }
    if (what.plan) this.notePlan(step, what, before, after);
    if (at === "result" || at === "failed") this.noteResult(step, what, before);
    return what;
  }

  noteArrival({number, adapter, grammar}, id, step) {
    this.lastNumber = number;
    const entry = this.byId.get(id) ?? {id, index: this.byId.size, lives: []};
    this.byId.set(id, entry);
    entry.tag = [adapter, grammar].filter(Boolean).join(" ");
    entry.lives.push({begin: step, end: null}); // steps, and when it has ended its last state
  }

  // Who it computes, who waits, who runs and has nothing in it.
  notePlan(step, what, before, after) {
    const plan = (what.plan = {...NO_PLAN, ...what.plan});
    checkPlan(plan, before, after);
    const cells = Map.groupBy(F.cells(plan, after), ({request}) => request);
    const idle = after.running.filter((id) => !cells.has(id));
    step.plans.push(plan);
    this.planned.set(plan.step, {plan, cells, idle, waiting: after.waiting});
    // The hits of the plan: request -> the blocks that were found for it.
    const size = this.run.block_size;
    for (const [id, n] of plan.admitted) {
      const tables = F.request(after, id)?.tables ?? [];
      const found = tables.flatMap((table) => table.slice(0, Math.ceil(n / size))).filter(Boolean);
      if (n) what.hits.set(id, found);
    }
  }

  noteResult(step, what, before) {
    const {error, step: number = Object.keys(before.in_flight)[0]} = what.result;
    const seen = this.planned.get(Number(number));
    const inFlight = before.in_flight[number]; // planned before the film began
    if (seen) Object.assign(step, seen);
    else if (inFlight) step.plan = {...NO_PLAN, ...inFlight, step: Number(number)};
    if (error === undefined) step.result = what.result = {...NO_RESULT, ...what.result};
    else step.error = error;
    step.tokens = what.tokens;
    const place = ([id]) => step.plan?.requests.indexOf(id);
    what.published.sort((a, b) => place(a) - place(b));
  }

  // The frame behind so many lines. It is kept and shared: do not change it.
  frameBehind(number) {
    let frame = this.recent.get(number);
    if (frame === undefined) {
      let at = Math.min(Math.floor(number / KEPT_EVERY), this.kept.length - 1);
      [at, frame] = [at * KEPT_EVERY, this.kept[at]];
      for (const [from, recent] of this.recent) {
        if (from > at && from <= number) [at, frame] = [from, recent];
      }
      while (at < number) frame = F.apply(frame, this.lines[at++].changes);
    }
    this.recent.delete(number);
    this.recent.set(number, frame);
    if (this.recent.size > NUM_RECENT) this.recent.delete(this.recent.keys().next().value);
    return frame;
  }

  // The frame after step i; -1: before the first.
  stateAfter(i) {
    if (!(i >= -1 && i < this.numSteps)) throw new RangeError(`the film has no step ${i}`);
    return this.frameBehind(i < 0 ? 0 : this.steps[i].end);
  }

  // A request as a frame after step i has it, or as it was when it ended.
  requestIn(frame, id, i) {
    const ended = ({end}) => end !== null && end <= i;
    return F.request(frame, id) ?? this.byId.get(id)?.lives.findLast(ended)?.request;
  }

  // Why each waiting request did not run in step i: id -> reason, "" for one that had no say in
  // it (it was preempted by this very plan, or has just come). In the order of the queue.
  waits(i) {
    return waitsOf(this.steps[i]);
  }

  // The same for the plan that was made last.
  waitsNow() {
    return waitsOf([...this.planned.values()].at(-1));
  }
};

const waitsOf = ({plan, waiting = []} = {}) =>
  new Map(waiting.map((id) => [id, plan.skipped[id] ?? plan.stop?.[0] ?? ""]));

// Of loads: what began, and what arrived, with its blocks.
function loadsOf({loads_begun: begun}, before, after) {
  const blocksOf = (id) => [id, after.loads[id].blocks];
  const hasArrived = (id) => after.loads[id].has_arrived && !before.loads[id]?.has_arrived;
  return {
    begun: begun.map(blocksOf),
    loaded: Object.keys(after.loads).filter(hasArrived).map(blocksOf),
    sources: Object.entries(after.loaded)
      .map(([name, n]) => [name, n - (before.loaded[name] ?? 0)]).filter(([, n]) => n),
  };
}

// Of each published block the one before it: with groups of layers, that of the request's table.
function parentsOf(published, before, after) {
  const parentOf = (id, {parent, group, place}) =>
    parent ?? ((after.tables[id] ?? before.tables[id])?.[group]?.[place - 1] || null);
  return new Map(published.flatMap(([id, blocks]) =>
    blocks.map((block) => [block, parentOf(id, after.cached[block])])));
}

function checkPlan(plan, before, after) {
  const wrong = (key, values) => {
    throw new Error(Watch.t(`wrong.${key}`, values));
  };
  const begins = new Map(plan.admitted);
  plan.requests.forEach((id, i) => {
    const [start, computed] = [plan.starts[i], begins.get(id) ?? before.computed[id]];
    if (!after.running.includes(id)) wrong("not_running", {step: plan.step, request: id});
    if (start !== computed) wrong("start", {request: id, start, computed});
  });
  if (before.free === after.free) return;
  const block = after.free.find((one) => one in after.refs);
  if (block !== undefined) wrong("free", {block});
}
