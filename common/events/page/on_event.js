"use strict";
// What each kind of event does to a state: the methods `_on_...` of `State` in
// workshop/watch/replay/film.py.
(() => {
  const require = Watch.requireThat;
  const same = (a, b) => a.length === b.length && a.every((item, i) => item === b[i]);
  const on = {};

  // -- requests

  on.arrived = (state, event) => {
    const id = event.request;
    const known = state.requests.get(id);
    require(known === undefined || known.finishReason !== null, "twice", {request: id});
    state.requests.delete(id); // it stands last, among the new ones
    const request = new Watch.Request(event, state.numLives++);
    if (state.run.windows.length) request.tables = state.run.windows.map(() => []);
    state.requests.set(id, request);
    state.owned.add(id);
    state.waiting.push(id);
  };

  on.queue = (state, event) => {
    const isSame = same([...event.order].sort(), [...state.waiting].sort());
    require(isSame, "queue", {order: event.order, waiting: state.waiting});
    state.waiting = [...event.order];
  };

  on.admitted = (state, event) => {
    const id = event.request;
    const place = state.waiting.indexOf(id);
    require(place >= 0, "admitted", {request: id});
    state.waiting.splice(place, 1);
    state.running.add(id);
    const request = state.own(id);
    request.numComputedTokens = event.num_cached_tokens;
    if (request.numPreemptions === 0) request.numCachedTokens = event.num_cached_tokens;
  };

  on.preempted = (state, event) => {
    const id = event.request;
    require(state.running.has(id), "preempted", {request: id});
    state.running.delete(id);
    state.waiting.unshift(id);
    const request = state.own(id);
    const [computed, lost] = [request.numComputedTokens, event.num_lost_tokens];
    require(lost === computed, "lost", {request: id, lost, computed});
    request.numComputedTokens = 0;
    request.numPreemptions += 1;
  };

  on.finished = (state, event) => {
    const id = event.request;
    const request = state.own(id);
    require(request.finishReason === null, "ended", {request: id});
    request.finishReason = event.reason;
    request.stopReason = event.stop_reason;
    request.detail = event.detail;
    request.finishedAt = event.time;
    request.rest = event.rest;
    state.running.delete(id);
    state.waiting = state.waiting.filter((other) => other !== id);
  };

  on.cut = (state, event) => {
    const request = state.own(event.request);
    require(request.finishReason !== null, "cut", {request: event.request});
    request.finishReason = "stop";
    request.stopReason = event.stop_string;
    request.textLength = event.text_length;
    request.detail = null;
  };

  // -- blocks

  on.taken = (state, event) => {
    for (const block of event.blocks) {
      const first = state.free.values().next().value;
      require(first !== undefined, "none_free", {block});
      require(block === first, "taken", {block, first});
      state.free.delete(block);
      state.refCnt[block] = 1;
    }
  };

  on.shared = (state, event) => {
    for (const block of event.blocks) state.hold(block);
  };

  on.freed = (state, event) => {
    for (const block of event.blocks) state.drop(block);
    for (const block of [...event.blocks].reverse()) { // the deepest is evicted first
      if (state.cached.has(block) && state.refCnt[block] === 1) state.use(block);
    }
  };

  on.table = (state, event) => {
    const request = state.own(event.request);
    const {request: id, keep, group, blocks} = event;
    const table = request.tables[group] ?? [];
    require(keep <= table.length, "table", {request: id, keep});
    request.tables = request.tables.with(group, table.slice(0, keep).concat(blocks));
  };

  // -- the prefix cache

  on.matched = (state, event) => {
    state.lastMatch = event;
    for (const block of [...event.blocks].reverse()) {
      require(state.cached.has(block), "not_cached", {block});
      if (state.refCnt[block] === 1) state.use(block);
    }
  };

  on.published = (state, event) => {
    const {start, given, kept, group} = event;
    require(given.length === kept.length, "length");
    const request = state.request(event.request);
    const size = state.run.block_size;
    const load = state.loads.get(event.request);
    const before = load === undefined ? request.tables[group] : load.prefix;
    require(start <= before.length, "table", {request: event.request, keep: start});
    const {cacheRefs} = state;
    let parent = start && cacheRefs ? before.at(start - 1) : null;
    const tokens = request.tokens;
    kept.forEach((block, i) => {
      if (block !== given[i]) state.hold(block);
    });
    kept.forEach((block, i) => {
      if (block !== given[i]) {
        require(state.cached.has(block), "not_cached", {block});
        state.drop(given[i]);
      } else {
        if (cacheRefs) state.hold(block);
        const content = tokens.slice((start + i) * size, (start + i + 1) * size);
        require(content.length === size, "not_full", {block});
        const blockHash = event.hashes[i] ?? "";
        const known = {tokens: content, parent, tenant: request.tenant, blockHash};
        state.cached.set(block, cacheRefs ? known : {...known, group, place: start + i});
        state.lastUse.set(block, 0);
      }
      if (cacheRefs) parent = block;
    });
    for (const block of event.node_heads) state.nodeHeads.add(block);
  };

  on.split = (state, event) => {
    require(state.cached.has(event.block), "not_cached", {block: event.block});
    state.nodeHeads.add(event.block);
  };

  on.evicted = (state, event) => {
    for (const block of event.blocks) {
      require(state.cached.has(block), "not_cached", {block});
      state.cached.delete(block);
      state.lastUse.delete(block);
      state.nodeHeads.delete(block);
      if (state.cacheRefs) state.drop(block);
    }
  };

  // -- KV from elsewhere

  on.load_begun = (state, event) => {
    state.loads.set(event.request, {prefix: event.prefix, blocks: event.blocks, hasArrived: false});
  };

  on.loaded = (state, event) => {
    require(state.loads.has(event.request), "no_load", {request: event.request});
    const {prefix} = state.loads.get(event.request);
    state.loads.set(event.request, {prefix, blocks: event.blocks, hasArrived: true});
    for (const [source, num] of Object.entries(event.sources)) {
      state.numLoaded.set(source, (state.numLoaded.get(source) ?? 0) + num);
    }
  };

  on.load_ended = (state, event) => {
    require(state.loads.delete(event.request), "no_load", {request: event.request});
  };

  // -- steps

  on.planned = (state, event) => {
    const lists = [event.starts, event.num_tokens];
    require(lists.every((list) => list.length === event.requests.length), "length");
    event.requests.forEach((id, i) => {
      const request = state.own(id);
      require(state.running.has(id), "not_running", {step: event.step, request: id});
      const [start, computed] = [event.starts[i], request.numComputedTokens];
      require(start === computed, "start", {request: id, start, computed});
      request.numComputedTokens = start + event.num_tokens[i];
    });
    state.underWay.push(event);
    state.plannedFor.push(event.requests.map((id) => state.requests.get(id).life));
    state.lastPlanned = event;
  };

  on.computed = (state, event) => {
    const planned = state.oldest(event.step);
    planned.requests.forEach((id, i) => {
      // A new request may have the name of one by now.
      if (state.request(id).life !== state.plannedFor[0][i]) return;
      const request = state.own(id);
      const numRejected = event.verified[id]?.[1] ?? 0;
      const end = planned.starts[i] + planned.num_tokens[i] - numRejected;
      request.highest = Math.max(request.highest, end);
    });
    for (const [id, tokens] of Object.entries(event.tokens)) {
      const request = state.own(id);
      request.outputs = request.outputs.concat(tokens);
      request.pieces = request.pieces.concat(event.pieces[id] ?? []);
    }
    for (const [id, [, numRejected]] of Object.entries(event.verified)) {
      state.own(id).numComputedTokens -= numRejected;
    }
  };

  on.updated = (state, event) => {
    state.oldest(event.step);
    state.underWay.shift();
    state.plannedFor.shift();
    state.numSteps += 1;
  };

  on.failed = (state, event) => {
    state.underWay = [];
    state.plannedFor = [];
    state.errors.push(event.error);
  };

  // -- a film that begins in the middle

  on.snapshot = (state, event) => {
    require(state.requests.size === 0 && state.cached.size === 0, "snapshot");
    for (const row of event.requests) restoreRequest(state, row);
    for (const {block, hash: blockHash, ...row} of event.cached) {
      state.cached.set(block, {...row, blockHash});
      state.use(block);
    }
    for (const {request, prefix, blocks, has_arrived: hasArrived} of event.loads) {
      state.loads.set(request, {prefix, blocks, hasArrived});
    }
    for (const row of event.under_way) {
      const drafts = Object.assign(Object.create(null), row.drafts);
      const unsaid = {passed_over: Object.create(null), parents: Object.create(null), stop: null};
      const times = {time: event.time, schedule_ms: 0};
      state.underWay.push({kind: "planned", ...times, ...unsaid, ...row, drafts});
      state.plannedFor.push(row.requests.map((id) => state.request(id).life));
    }
    state.waiting = [...event.waiting];
    state.running = new Set(event.running);
    state.nodeHeads = new Set(event.node_heads);
    for (const [source, num] of Object.entries(event.loaded)) state.numLoaded.set(source, num);
    state.free = new Set(event.free);
    const holders = [...state.requests.values()].flatMap(({tables}) => tables);
    if (state.cacheRefs) holders.push([...state.cached.keys()]);
    for (const {prefix, blocks} of state.loads.values()) holders.push(prefix, blocks);
    for (const block of holders.flat()) if (block) state.refCnt[block] += 1;
    const isRight = state.refCnt.every((n, block) => !block || (n === 0) === state.free.has(block));
    require(isRight, "snapshot");
  };

  function restoreRequest(state, row) {
    const {request: id, prompt_pieces: pieces, arrived_at: time} = row;
    const request = new Watch.Request({...row, pieces, time}, state.numLives++);
    Object.assign(request, {
      outputs: row.outputs,
      pieces: row.pieces,
      tables: [row.table, ...(row.tables ?? [])],
      numComputedTokens: row.num_computed_tokens,
      numCachedTokens: row.num_cached_tokens,
      numPreemptions: row.num_preemptions,
      highest: row.highest,
    });
    state.requests.set(id, request);
    state.owned.add(id);
  }

  Watch.onEvent = on;
})();
