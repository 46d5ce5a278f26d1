"use strict";
// What happened in a step, as sentences: [{group, key, values, sources, isRoutine}]. `group` is a
// request, or "" for what concerns the step, or "cache". `sources` name places in the source.
(() => {
  const {t} = Watch;
  const MOST_RANGES = 5;

  Watch.sayBlocks = (blocks) => {
    const ranges = Watch.blockRanges(blocks).split(", ");
    if (ranges.length > MOST_RANGES) {
      return t("say.many", {
        n: blocks.length,
        blocks: ranges.slice(0, MOST_RANGES).join(t("say.and")),
      });
    }
    return t(blocks.length === 1 ? "say.block" : "say.blocks", {blocks: ranges.join(t("say.and"))});
  };

  // Whoever takes blocks next: for it the ones before were evicted, or somebody was preempted.
  function nextTaker(events, from) {
    for (const event of events.slice(from)) {
      if (event.kind === "planned") return null;
      if (event.kind === "taken") return event.request;
    }
    return null;
  }

  // [how, source, for whom]. An event does not say why somebody was preempted; what follows does.
  function howPreempted(event, {events, at, state, run}) {
    const who = nextTaker(events, at + 1);
    const every = run.config.preempt_every;
    const isDue = every && (state.numSteps + state.underWay.length + 1) % every === 0;
    const isFirst = !events.slice(0, at).some(({kind}) => kind === "taken" || kind === "preempted");
    if (isDue && isFirst) return [".forced", "preempted:forced", who];
    const isAdmitted = events.slice(at).some((e) => e.kind === "admitted" && e.request === who);
    if (isAdmitted && state.running.size >= run.max_num_seqs)
      return [".seat", "preempted:seat", who];
    return [who !== null && who !== event.request ? ".for" : "", "preempted", who];
  }

  // What a request may do with blocks that it has just taken.
  const TAKERS = new Set(["table", "taken", "load_begun"]);

  // How each kind of event is said. `say(group, key, values, sources)` adds a sentence.
  const tell = {
    arrived(event, {say}) {
      say(event.request, "say.arrived", {n: event.prompt.length, most: event.max_tokens}, [
        "arrived",
      ]);
      const what = Watch.brings(event);
      if (what) say(event.request, "say.brings", {what}, ["arrived"]);
    },
    snapshot(event, {say}) {
      const values = {running: event.running.length, waiting: event.waiting.length};
      say("", "say.snapshot", values, ["snapshot"]);
    },
    queue(event, {say, run}) {
      const names = event.order.map(Watch.label);
      const order = names.length > 6 ? `${names.slice(0, 6).join(", ")}, …` : names.join(", ");
      say("", "say.queue", {order, policy: run.policy}, ["queue"]);
    },
    admitted(event, {say, state, run}) {
      const isBack = state.request(event.request).numPreemptions > 0;
      const n = event.num_cached_tokens;
      const blocks = Watch.sayBlocks(
        state.request(event.request).table.slice(0, Math.ceil(n / run.block_size)),
      );
      const key = `say.${isBack ? "returned" : "admitted"}${n ? ".cached" : ""}`;
      say(event.request, key, {n, blocks}, n ? ["admitted", "matched"] : ["admitted"]);
    },
    preempted(event, context) {
      const [how, source, who] = howPreempted(event, context);
      const values = {lost: event.num_lost_tokens, who: who === null ? "" : Watch.label(who)};
      context.say(event.request, `say.preempted${how}`, values, [source]);
    },
    finished(event, {say, state, events, at}) {
      // Where a stop string was its end, that is told, by the next event about it.
      if (events.slice(at).some((e) => e.kind === "cut" && e.request === event.request)) return;
      const n = state.request(event.request).outputs.length;
      say(event.request, `say.finished.${event.reason}`, {n}, [`finished:${event.reason}`]);
    },
    cut(event, {say}) {
      say(event.request, "say.cut", {text: Watch.visible(event.stop_string)}, ["cut"]);
    },
    taken(event, {say, events, at, run}) {
      const next = events
        .slice(at + 1)
        .find(({kind, request}) => TAKERS.has(kind) && request === event.request);
      const table = next?.kind === "table" ? next : undefined;
      const blocks = Watch.sayBlocks(event.blocks);
      if (!table?.blocks.length || run.windows.length) say(event.request ?? "cache", "say.taken", {blocks}, ["taken"]);
      else
        say(event.request, "say.taken.table", {blocks, n: table.keep + table.blocks.length}, [
          "taken",
          "table",
        ]);
    },
    shared(event, {say}) {
      say(event.request ?? "cache", "say.shared", {blocks: Watch.sayBlocks(event.blocks)}, [
        "shared",
      ]);
    },
    freed(event, {say, state}) {
      const sorted = {free: [], cached: [], used: []};
      for (const block of event.blocks) {
        const left = state.refCnt[block] - 1;
        const isCached = left === state.cacheRefs && state.cached.has(block);
        sorted[isCached ? "cached" : left === 0 ? "free" : "used"].push(block);
      }
      const parts = Object.entries(sorted)
        .filter(([, blocks]) => blocks.length)
        .map(([how, blocks]) => t(`say.freed.${how}`, {blocks: Watch.sayBlocks(blocks)}));
      say(event.request ?? "cache", "say.freed", {blocks: parts.join(t("words.comma"))}, ["freed"]);
    },
    matched(event, {say, run}) {
      const values = {
        n: event.blocks.length * run.block_size,
        blocks: Watch.sayBlocks(event.blocks),
        group: event.group,
      };
      const key = run.windows.length ? "say.matched.group" : "say.matched";
      say(event.request ?? "cache", key, values, ["matched"]);
    },
    published(event, {say, events, at, run}) {
      const isNew = (block, i) => block === event.given[i];
      const added = event.kept.filter(isNew);
      if (added.length) {
        const blocks = Watch.sayBlocks(added);
        const hash = event.hashes[event.kept.indexOf(added[0])];
        if (run.windows.length)
          say(event.request, "say.published.group", {blocks, group: event.group}, ["published"]);
        else if (added.length === 1 && hash)
          say(event.request, "say.published.hash", {blocks, hash}, ["published"]);
        else say(event.request, "say.published", {blocks}, ["published"]);
      }
      event.kept.forEach((kept, i) => {
        if (isNew(kept, i)) return;
        const values = {given: Watch.sayBlocks([event.given[i]]), kept: Watch.sayBlocks([kept])};
        // The table is another event; where it does not come, the request goes on with what it gave.
        const place = event.start + i;
        const named = events
          .slice(at)
          .filter(({kind, request}) => kind === "table" && request === event.request)
          .filter(({keep, group}) => keep <= place && group === event.group)
          .map(({keep, blocks}) => blocks[place - keep]);
        if (named.includes(kept))
          say(event.request, "say.known", values, ["published:known", "table:moved"]);
        else {
          const key = named.length ? "say.known.ended" : "say.known.stays";
          say(event.request, key, values, ["published:known"]);
        }
      });
    },
    split(event, {say}) {
      say("cache", "say.split", {blocks: Watch.sayBlocks([event.block])}, ["split"]);
    },
    evicted(event, {say, events, at, run}) {
      const who = nextTaker(events, at + 1);
      const values = {
        blocks: Watch.sayBlocks(event.blocks),
        who: who === null ? "" : Watch.label(who),
      };
      const how = run.windows.length ? ".taken" : who === null ? "" : ".for";
      say("cache", `say.evicted${how}`, values, ["evicted"]);
    },
    load_begun(event, {say}) {
      say(event.request, "say.load_begun", {blocks: Watch.sayBlocks(event.blocks)}, ["load_begun"]);
    },
    loaded(event, {say}) {
      const sources = Object.entries(event.sources)
        .map(([name, n]) => t(`say.${name}`, {n}))
        .join(t("words.comma"));
      if (!event.blocks.length) say(event.request, "say.loaded.nothing", {}, ["loaded"]);
      else
        say(event.request, "say.loaded", {blocks: Watch.sayBlocks(event.blocks), sources}, [
          "loaded",
        ]);
    },
    load_ended(event, {say}) {
      say(event.request, "say.load_ended", {}, ["load_ended"]);
    },
    planned(event, context) {
      tellWaiting(event, context);
    },
    computed(event, context) {
      tellComputed(event, context);
    },
    failed(event, {say}) {
      say("", "say.failed", {error: event.error}, ["failed"]);
    },
  };

  // Why the others wait: each that was passed over, and the stop for all who stand behind it.
  function tellWaiting(event, {say, state, events, at: now, run}) {
    for (const [id, reason] of Object.entries(event.passed_over)) {
      const who = event.parents[id];
      if (who !== undefined) say(id, "say.parent", {who: Watch.label(who)}, ["reason:parent"]);
      else say(id, "say.passed_over", {reason: Watch.reasonWords(run, reason)}, [`reason:${reason}`]);
    }
    if (event.stop === null) return;
    const [reason, at] = event.stop;
    const others = state.waiting.filter((id) => id !== at && !(id in event.passed_over)).length;
    // At nobody: admission ended behind the last who was admitted, or never began.
    const was = (what) => events.slice(0, now).some(({kind}) => kind === what);
    const how = at !== "" ? "" : was("admitted") ? "others" : "nobody";
    const key = how ? `say.stop.${how}` : others ? "say.stop.behind" : "say.stop";
    const special = `reason:${reason}:${how}`;
    const source = how && Watch.sourceOf(run, special) ? special : `reason:${reason}`;
    say("", key, {who: Watch.label(at), n: others, reason: Watch.reasonWords(run, reason)}, [source]);
  }

  // What the step computed of each request, by kinds of tokens.
  function tellComputed(event, {say, state, facts}) {
    for (const [id, cells] of facts.cells) {
      const request = state.request(id);
      for (const {kind, start, numTokens: n} of cells) {
        const left = request.prompt.length - start - n;
        if (kind === "prompt" && left > 0) say(id, "say.chunk", {n, left}, ["chunk"]);
        else if (kind === "prompt") say(id, "say.prompt", {n}, ["planned"]);
        else if (kind === "recomputed") say(id, "say.again", {n}, ["planned"]);
      }
      const verdict = event.verified[id];
      if (verdict !== undefined) {
        const [accepted, rejected] = verdict;
        say(id, "say.drafts", {accepted, n: accepted + rejected}, ["drafts"]);
        if (rejected) say(id, "say.rejected", {n: rejected}, ["drafts:rejected"]);
      } else if (event.tokens[id]?.length === 1 && cells.every(({kind}) => kind === "decode")) {
        say(id, "say.decode", {}, ["computed"], true);
      }
    }
    for (const id of Object.keys(event.discarded)) say(id, "say.discarded", {}, ["discarded"]);
    if (facts.cells.size === 0) say("", "say.empty", {}, ["planned"]);
  }

  const last = new WeakMap(); // film -> what was told last; two panels ask
  Watch.sentencesOf = (view) => {
    const told = `${view.step} ${Watch.store.language}`;
    if (last.get(view.film)?.told !== told) last.set(view.film, {told, sentences: tellAll(view)});
    return last.get(view.film).sentences;
  };

  function tellAll({film, step, facts}) {
    const sentences = [];
    if (facts === null) return sentences;
    const say = (group, key, values, sources, isRoutine = false) => {
      sentences.push({group, key, values, sources, isRoutine});
    };
    const {run} = film;
    if (step === 0) say("", "say.run", {scheduler: run.scheduler, policy: run.policy}, ["run"]);
    let at = 0;
    film.replay(step, (event, state) => {
      tell[event.kind]?.(event, {say, events: facts.events, at, state, run, facts});
      at += 1;
    });
    return inOrder(withoutRepeats(sentences));
  }

  // Whoever is admitted with cached tokens says how many, and in which blocks: that they were looked
  // up and shared is the same once more.
  function withoutRepeats(sentences) {
    const isHit = ({key}) => /^say\.(admitted|returned)\.cached$/.test(key);
    const told = new Set(sentences.filter(isHit).map(({group}) => group));
    const isRepeat = ({key}) => key === "say.matched" || key === "say.shared";
    return sentences.filter((sentence) => !(told.has(sentence.group) && isRepeat(sentence)));
  }

  // A request gets its blocks and then its place among those who run; a reader wants to hear of the
  // place first.
  function inOrder(sentences) {
    const ordered = [];
    for (const sentence of sentences) {
      const isPlace = /^say\.(admitted|returned)/.test(sentence.key);
      const first = isPlace
        ? ordered.findIndex(({group, key}) => group === sentence.group && key === "say.taken.table")
        : -1;
      ordered.splice(first < 0 ? ordered.length : first, 0, sentence);
    }
    return ordered;
  }
})();
