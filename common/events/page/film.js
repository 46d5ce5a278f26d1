"use strict";
// The film of a run: what each step did, and the engine's state after any of them. The mirror of
// `Film` in workshop/watch/replay/film.py; test_film_in_browser.py compares the two after every step.
//
// A film whose events contradict themselves (a broken engine may write such) ends there, and says
// so: `film.contradiction` is null or {step, message}, and the last step is the one that it broke.
//
// A film may go on: `film.with(events)` is the longer one. They share what both have; the shorter one
// is not to be used any more.
(() => {
  const CHECKPOINT_EVERY = 32; // steps; a jump replays at most so many
  const NUM_RECENT = 16; // states that were asked for last, kept

  const newStep = (number, first) => ({
    number, first, events: [], planned: null, plans: [], computed: null, updated: null,
    failed: null, cells: new Map(), idle: [], marks: new Map(),
  });

  class Film {
    constructor(events) {
      const [run, ...rest] = events;
      this.run = run;
      this.events = [];
      this.steps = [];
      this.requests = [];
      this.contradiction = null;
      this.ends = []; // of each step, how many events stand before its end
      this.byId = new Map(); // request id -> its entry in `requests`
      this.seen = new Map(); // plan -> who waited, who ran without computing, and its cells
      this.checkpoints = [new Watch.State(run)];
      this.recent = new Map();
      this.now = this.checkpoints[0].copy(); // after all events, also those behind the last step
      this.open = newStep(0, 0);
      this.read(rest);
    }

    // Another object, so that whoever keeps what it worked out of a film sees that there is more.
    with(events) {
      const film = Object.assign(Object.create(Film.prototype), this);
      film.read(events);
      return film;
    }

    get numSteps() {
      return this.steps.length;
    }

    // One pass over the events, which finds contradictions, too.
    read(events) {
      if (this.contradiction) return;
      const state = this.now;
      let step = this.open;
      for (const event of events) {
        const position = this.events.length;
        step.events.push(event);
        try {
          this.note(step, state, event);
          state.apply(event);
        } catch (error) {
          this.contradiction = {step: step.number, message: error.message};
          this.close(step, position);
          return;
        }
        this.events.push(event);
        if (event.kind === "planned") this.notePlan(step, state, event);
        if (event.kind === "updated" || event.kind === "failed") {
          this.close(step, position + 1);
          if (this.steps.length % CHECKPOINT_EVERY === 0) this.checkpoints.push(state.copy());
          step = newStep(step.number + 1, position + 1);
        }
      }
      this.open = step;
      // Arrivals and aborts behind the last step belong to no step; those requests are known.
      this.isCut = step.plans.length > 0;
    }

    // Before an event is applied.
    note(step, state, event) {
      const mark = (name) => {
        if (!step.marks.has(event.request)) step.marks.set(event.request, []);
        step.marks.get(event.request).push(name);
      };
      if (event.kind === "snapshot") {
        for (const row of event.requests) this.noteArrival(row, step.number);
      } else if (event.kind === "arrived") {
        this.noteArrival(event, step.number);
        mark("arrived");
      } else if (event.kind === "admitted") {
        const isBack = state.requests.get(event.request)?.numPreemptions > 0;
        mark(isBack ? "returned" : "admitted");
      } else if (event.kind === "preempted") {
        mark("preempted");
      } else if (event.kind === "finished") {
        this.byId.get(event.request)?.lives.at(-1).splice(1, 1, step.number);
        mark("finished");
      } else if (event.kind === "computed" || event.kind === "failed") {
        step[event.kind] = event;
        step.planned = state.underWay[0] ?? null;
        const seen = this.seen.get(step.planned);
        if (seen !== undefined) Object.assign(step, {cells: seen.cells, idle: seen.idle});
      } else if (event.kind === "updated") {
        step.updated = event;
      }
    }

    noteArrival({request: id, adapter, grammar}, step) {
      if (!this.byId.has(id)) {
        const entry = {id, index: this.requests.length, lives: [], get arrivedStep() {
          return this.lives[0][0];
        }, get endStep() {
          return this.lives.at(-1)[1];
        }};
        this.byId.set(id, entry);
        this.requests.push(entry);
      }
      const entry = this.byId.get(id);
      entry.tag = [adapter, grammar].filter(Boolean).join(" ");
      entry.lives.push([step, null]); // [arrived in, ended in]
    }

    // Behind a plan: who it computes, who waits, who runs and has nothing in it.
    notePlan(step, state, planned) {
      const cells = new Map();
      for (const cell of state.cells(planned)) {
        if (!cells.has(cell.request)) cells.set(cell.request, []);
        cells.get(cell.request).push(cell);
      }
      const idle = [...state.running].filter((id) => !cells.has(id));
      step.plans.push(planned);
      this.seen.set(planned, {cells, idle, waiting: state.waiting.slice()});
    }

    close(step, end) {
      this.steps.push(step);
      this.ends.push(end);
    }

    // The state after step i, -1: before the first. It is kept and shared: do not change it.
    stateAfter(i) {
      if (!(i >= -1 && i < this.numSteps)) throw new RangeError(`the film has no step ${i}`);
      if (i === -1) return this.checkpoints[0];
      let state = this.recent.get(i);
      this.recent.delete(i);
      if (state === undefined) {
        const [from, nearest] = this.nearest(i);
        state = nearest.copy();
        const start = from < 0 ? 0 : this.ends[from];
        for (let position = start; position < this.ends[i]; position++) {
          state.apply(this.events[position]);
        }
      }
      this.recent.set(i, state);
      if (this.recent.size > NUM_RECENT) this.recent.delete(this.recent.keys().next().value);
      return state;
    }

    // The last state at or before step i that is at hand: [its step, it].
    nearest(i) {
      const whole = Math.floor((i + 1) / CHECKPOINT_EVERY);
      const checkpoint = Math.min(whole, this.checkpoints.length - 1); // a broken one has none
      let [from, state] = [checkpoint * CHECKPOINT_EVERY - 1, this.checkpoints[checkpoint]];
      for (const [step, recent] of this.recent) {
        if (step > from && step <= i) [from, state] = [step, recent];
      }
      return [from, state];
    }

    // Calls visit(event, state) for each event of step i; the state is that before the event.
    replay(i, visit) {
      const state = this.stateAfter(i - 1).copy();
      for (let position = this.steps[i].first; position < this.ends[i]; position++) {
        visit(this.events[position], state);
        state.apply(this.events[position]);
      }
    }

    // Why each waiting request did not run in step i: id -> reason, "" for one that had no say in
    // it (it was preempted by this very plan, or has just come). In the order of the queue.
    waits(i) {
      const planned = this.steps[i]?.planned;
      const seen = this.seen.get(planned);
      if (seen === undefined) return new Map();
      if (seen.waits === undefined) {
        const stop = planned.stop === null ? "" : planned.stop[0];
        seen.waits = new Map(seen.waiting.map((id) => [id, planned.passed_over[id] ?? stop]));
      }
      return seen.waits;
    }
  }

  Watch.Film = Film;
})();
