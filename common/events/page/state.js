"use strict";
// An engine after some events: the mirror of `State` in workshop/watch/replay/film.py, name by name.
//
// A state can be copied cheaply, and that is what makes scrubbing quick: copies share their
// requests, and a state makes a request its own before it changes it (`own`).
(() => {
  Watch.words({
    "wrong.never": ["request “{request}” has never arrived", "请求“{request}”从未到达"],
    "wrong.twice": ["request “{request}” arrived, and has not ended", "请求“{request}”还没结束又到达了一次"],
    "wrong.queue": ["the queue is {order}, and {waiting} wait", "队列是 {order}，而等待的是 {waiting}"],
    "wrong.admitted": ["request “{request}” was admitted, and did not wait",
      "请求“{request}”没有排队却被准入"],
    "wrong.preempted": ["request “{request}” was preempted, and did not run",
      "请求“{request}”没有运行却被抢占"],
    "wrong.lost": ["“{request}” lost {lost} tokens, and {computed} are computed",
      "“{request}”丢了 {lost} 个 token，而算好的有 {computed} 个"],
    "wrong.ended": ["request “{request}” ended twice", "请求“{request}”结束了两次"],
    "wrong.cut": ["request “{request}” was cut, and goes on", "请求“{request}”被截断，却还在继续"],
    "wrong.taken": ["block {block} was taken, and {first} is the next",
      "取走的是块 {block}，而轮到的是 {first}"],
    "wrong.none_free": ["block {block} was taken, and no block is free", "取走的是块 {block}，但已经没有空闲块"],
    "wrong.shared": ["block {block} was shared, and is free", "块 {block} 是空闲的，却被共享"],
    "wrong.freed": ["block {block} was freed, and is free", "块 {block} 本来就空闲，却又被释放"],
    "wrong.table": ["the table of “{request}” is shorter than the {keep} entries that it keeps",
      "“{request}”的块表不足 {keep} 项，无从保留"],
    "wrong.not_cached": ["block {block} is not cached", "块 {block} 不在缓存里"],
    "wrong.not_full": ["block {block} was published, and is not full", "块 {block} 没写满就被发布"],
    "wrong.no_load": ["nothing was being loaded for “{request}”", "“{request}”没有正在进行的加载"],
    "wrong.not_running": ["step {step} computes “{request}”, which does not run",
      "第 {step} 步计算“{request}”，但它没有在运行"],
    "wrong.start": ["“{request}” goes on at {start}, and {computed} are computed",
      "“{request}”从 {start} 继续，而算好的有 {computed} 个"],
    "wrong.order": ["step {step} was computed, and is not the oldest in flight",
      "算完的是第 {step} 步，但它不是最早进行中的一步"],
    "wrong.snapshot": ["a snapshot comes too late, or a block in it is free and held, or neither",
      "快照来得太晚，或者快照中某个块既空闲又有人持有，或者两者都不是"],
    "wrong.length": ["two lists of one event differ in length", "同一事件的两个列表长度不同"],
  });

  class Contradiction extends Error {}

  function require(isRight, key, values = {}) {
    if (!isRight) throw new Contradiction(Watch.t(`wrong.${key}`, values));
  }

  class Request {
    constructor(event, life) {
      this.id = event.request;
      this.life = life; // a name may come again when its request has ended
      this.prompt = event.prompt;
      this.promptPieces = event.pieces;
      this.maxTokens = event.max_tokens;
      this.priority = event.priority;
      this.tenant = event.tenant;
      this.orderKey = event.order_key;
      this.adapter = event.adapter ?? ""; // a snapshot may be older than these two
      this.grammar = event.grammar ?? "";
      this.arrivedAt = event.time;
      this.outputs = [];
      this.pieces = [];
      this.tables = [[]]; // of each group of layers
      this.numComputedTokens = 0;
      this.numCachedTokens = 0; // at its first admission
      this.numPreemptions = 0;
      this.highest = 0; // position up to which it was ever computed
      this.finishReason = null;
      this.stopReason = null;
      this.detail = null;
      this.rest = "";
      this.textLength = null;
      this.finishedAt = null;
    }

    // Of the first group, and most models have no other.
    get table() {
      return this.tables[0];
    }

    get tokens() {
      return this.prompt.concat(this.outputs);
    }

    // Of the outputs. Python counts characters, and not halves of them.
    get text() {
      const text = this.pieces.join("") + this.rest;
      return this.textLength === null ? text : [...text].slice(0, this.textLength).join("");
    }
  }

  class State {
    constructor(run) {
      this.run = run;
      this.cacheRefs = run.windows.length ? 0 : 1; // that the cache has on each of its blocks
      this.requests = new Map();
      this.waiting = []; // in the order of service
      this.running = new Set(); // in order of admission
      this.refCnt = new Array(run.num_blocks).fill(0);
      this.free = new Set(); // in the free order
      for (let block = 1; block < run.num_blocks; block++) this.free.add(block);
      this.cached = new Map(); // block -> {tokens, parent, tenant, blockHash, group, place}
      this.nodeHeads = new Set(); // with a radix tree: blocks that begin a node
      this.lastMatch = null;
      this.loads = new Map(); // request -> {prefix, blocks, hasArrived}
      this.numLoaded = new Map(); // blocks, by source
      this.underWay = [];
      this.plannedFor = []; // of each of them, the lives of whom it computes
      this.lastPlanned = null;
      this.numSteps = 0; // that are over
      this.errors = [];
      this.lastUse = new Map(); // of cached blocks: when nobody used them any more
      this.clock = 0;
      this.numLives = 0;
      this.owned = new Set(); // ids of requests that no other state shares
    }

    // What is changed in place is copied; requests are shared until one of the two changes them.
    copy() {
      const copy = Object.assign(Object.create(State.prototype), this);
      copy.requests = new Map(this.requests);
      copy.running = new Set(this.running);
      copy.refCnt = this.refCnt.slice();
      copy.free = new Set(this.free);
      copy.cached = new Map(this.cached);
      copy.nodeHeads = new Set(this.nodeHeads);
      copy.loads = new Map(this.loads);
      copy.numLoaded = new Map(this.numLoaded);
      copy.waiting = this.waiting.slice();
      copy.underWay = this.underWay.slice();
      copy.plannedFor = this.plannedFor.slice();
      copy.errors = this.errors.slice();
      copy.lastUse = new Map(this.lastUse);
      copy.owned = new Set();
      this.owned = new Set();
      return copy;
    }

    apply(event) {
      Watch.onEvent[event.kind](this, event);
    }

    // -- questions

    request(id) {
      require(this.requests.has(id), "never", {request: id});
      return this.requests.get(id);
    }

    own(id) {
      const request = this.request(id);
      if (this.owned.has(id)) return request;
      const mine = Object.assign(Object.create(Request.prototype), request);
      this.requests.set(id, mine);
      this.owned.add(id);
      return mine;
    }

    // Why a waiting request did not run in the step that was planned last; null if it runs, has
    // ended, or was not there.
    reasonToWait(id) {
      const planned = this.lastPlanned;
      if (planned === null || !this.waiting.includes(id)) return null;
      if (Object.hasOwn(planned.passed_over, id)) return planned.passed_over[id];
      return planned.stop === null ? null : planned.stop[0];
    }

    // Cached blocks that nobody uses, the next to be evicted first.
    evictionOrder() {
      if (!this.cacheRefs) return [...this.free].filter((block) => this.cached.has(block));
      const idle = [...this.cached.keys()].filter((block) => this.refCnt[block] === 1);
      return idle.sort((a, b) => this.lastUse.get(a) - this.lastUse.get(b));
    }

    // All tokens that a cached block depends on, its own last.
    prefixOf(block) {
      const parts = [];
      for (let place = block; place !== null; place = this.cached.get(place).parent) {
        parts.push(this.cached.get(place).tokens);
      }
      return parts.reverse().flat();
    }

    // With a radix tree: the blocks of each node, head first.
    nodes() {
      const below = new Map();
      for (const [block, cached] of this.cached) {
        if (!this.nodeHeads.has(block)) below.set(cached.parent, block);
      }
      return [...this.nodeHeads].sort((a, b) => a - b).map((head) => {
        const node = [head];
        for (let block; (block = below.get(node.at(-1))) !== undefined; ) node.push(block);
        return node;
      });
    }

    // Whose tables name it.
    usersOf(block) {
      const users = [];
      for (const [id, {tables}] of this.requests) {
        if (tables.some((table) => table.includes(block))) users.push(id);
      }
      return users;
    }

    // A plan by kinds of tokens: [{request, kind, start, numTokens}]. To be asked before what came
    // of it is applied.
    cells(planned) {
      const cells = [];
      planned.requests.forEach((name, i) => {
        const request = this.request(name);
        const numDrafts = planned.drafts[name]?.length ?? 0;
        const end = planned.starts[i] + planned.num_tokens[i] - numDrafts;
        const bounds = [
          ["recomputed", request.highest], ["prompt", request.prompt.length], ["decode", end],
        ];
        let first = planned.starts[i];
        for (const [kind, bound] of bounds) {
          const stop = Math.min(Math.max(bound, first), end);
          const numTokens = stop - first;
          if (numTokens <= 0) continue;
          cells.push({request: name, kind, start: first, numTokens});
          first = stop;
        }
        if (numDrafts) cells.push({request: name, kind: "draft", start: end, numTokens: numDrafts});
      });
      return cells;
    }

    // -- holders of blocks

    hold(block) {
      const isKnown = !this.cacheRefs && this.cached.has(block);
      require(this.refCnt[block] > 0 || isKnown, "shared", {block});
      this.free.delete(block);
      this.refCnt[block] += 1;
    }

    drop(block) {
      require(this.refCnt[block] > 0, "freed", {block});
      this.refCnt[block] -= 1;
      if (this.refCnt[block] === 0) this.free.add(block);
    }

    use(block) {
      this.clock += 1;
      this.lastUse.set(block, this.clock);
    }

    oldest(step) {
      require(this.underWay.length > 0 && this.underWay[0].step === step, "order", {step});
      return this.underWay[0];
    }
  }

  Object.assign(Watch, {State, Request, Contradiction, requireThat: require});
})();
