"use strict";
// What happened in a step, as sentences: [{group, key, values, sources, isRoutine}]. `group` is a
// request, or "" for what concerns the step, or "cache". `sources` name places in the source.
(() => {
  Watch.words({
    "say.run": ["the run begins: scheduler {scheduler}, policy {policy}", "运行开始：调度器 {scheduler}，策略 {policy}"],
    "say.arrived": ["arrives: {n} prompt tokens, at most {most} outputs", "到达：提示词 {n} 个 token，最多输出 {most} 个"],
    "say.queue": ["the queue stands in the order {order} (policy {policy})", "队列顺序变为 {order}（策略 {policy}）"],
    "say.admitted": ["is admitted; nothing of it was cached", "准入；缓存里没有它的内容"],
    "say.admitted.cached": ["is admitted with {n} cached tokens: {blocks}", "准入，其中 {n} 个 token 命中缓存：{blocks}"],
    "say.returned": ["returns, to be computed again", "恢复运行，需要重新计算"],
    "say.returned.cached": ["returns; {n} tokens are still cached: {blocks}", "恢复运行，有 {n} 个 token 仍在缓存：{blocks}"],
    "say.preempted": ["is preempted: no block is free, and it is itself the next to give way; {lost} computed tokens are lost",
      "被抢占：没有空闲块，而轮到让位的正是它自己；已算的 {lost} 个 token 作废"],
    "say.preempted.for": ["is preempted, so that {who} gets blocks; {lost} computed tokens are lost",
      "被抢占，好让 {who} 拿到块；已算的 {lost} 个 token 作废"],
    "say.preempted.seat": ["is preempted: {who} is more urgent and takes its seat; {lost} computed tokens are lost",
      "被抢占：{who} 更紧急，占了它的席位；已算的 {lost} 个 token 作废"],
    "say.preempted.forced": ["is preempted by the debug switch preempt_every; {lost} computed tokens are lost",
      "被调试开关 preempt_every 强制抢占；已算的 {lost} 个 token 作废"],
    "say.finished.stop": ["ends: it sampled an end token", "结束：采样到结束 token"],
    "say.finished.length": ["ends: it has the {n} outputs that it may have", "结束：已输出允许的 {n} 个 token"],
    "say.finished.abort": ["is aborted", "被中止"],
    "say.finished.error": ["ends with an error", "因错误结束"],
    "say.cut": ["ends at the stop string “{text}”", "遇到停止串“{text}”而结束"],
    "say.taken": ["takes {blocks} from the free list", "从空闲表取用{blocks}"],
    "say.taken.table": ["takes {blocks} from the free list; its table has {n} now", "从空闲表取用{blocks}；块表现有 {n} 块"],
    "say.shared": ["shares {blocks}", "共享{blocks}"],
    "say.freed": ["gives up {blocks}", "释放{blocks}"],
    "say.freed.free": ["{blocks} (free now)", "{blocks}（变为空闲）"],
    "say.freed.cached": ["{blocks} (still cached)", "{blocks}（仍在缓存）"],
    "say.freed.used": ["{blocks} (still in use)", "{blocks}（仍有人用）"],
    "say.moved": ["its table points to {blocks} from here on: the same content", "块表改为指向{blocks}，内容相同"],
    "say.matched": ["finds {n} tokens of its prefix in the cache: {blocks}", "前缀有 {n} 个 token 命中缓存：{blocks}"],
    "say.published": ["publishes {blocks}", "发布{blocks}"],
    "say.published.hash": ["publishes {blocks}, hash {hash}", "发布{blocks}，哈希 {hash}"],
    "say.known": ["{given} held what {kept} has already: it uses that one", "{given} 的内容与{kept} 相同：改用后者"],
    "say.split": ["a node is cut in two in front of {blocks}", "节点在{blocks} 之前拆分为二"],
    "say.evicted": ["{blocks} evicted: unused for longest", "{blocks} 被淘汰：闲置最久"],
    "say.evicted.for": ["{blocks} evicted, so that {who} gets room: unused for longest",
      "{blocks} 被淘汰，给 {who} 腾地方：闲置最久"],
    "say.load_begun": ["its KV is on its way into {blocks}, from a tier or a store", "它的 KV 正从下级存储加载到{blocks}"],
    "say.loaded": ["its KV has arrived in {blocks} ({sources}), and is cached", "KV 已加载到{blocks}（{sources}），并进入缓存"],
    "say.loaded.nothing": ["its load brought nothing", "加载没有带来任何内容"],
    "say.load_ended": ["its load holds no block any more", "加载不再占用任何块"],
    "say.chunk": ["computes a piece of its prompt: {n} tokens, {left} are left", "计算提示词的一段：{n} 个 token，还剩 {left} 个"],
    "say.prompt": ["computes {n} prompt tokens, and has its whole prompt now", "计算 {n} 个提示词 token，提示词全部算完"],
    "say.again": ["computes {n} tokens again, lost by its preemption", "重算 {n} 个因抢占丢失的 token"],
    "say.decode": ["one new token", "一个新 token"],
    "say.guesses": ["{accepted} of {n} guesses accepted", "{n} 个草稿 token 接受了 {accepted} 个"],
    "say.rejected": ["{n} rejected, and that KV is taken back", "拒绝 {n} 个，对应的 KV 作废"],
    "say.passed_over": ["is passed over: {reason}", "被跳过：{reason}"],
    "say.parent": ["is passed over: {who} computes the very block that it could share",
      "被跳过：{who} 正在计算它可以共享的块"],
    "say.stop": ["admission stops at {who}: {reason}", "准入止于 {who}：{reason}"],
    "say.stop.behind": ["admission stops at {who}: {reason}; {n} behind it were not asked",
      "准入止于 {who}：{reason}；后面 {n} 个没有问到"],
    "say.stop.nobody": ["nobody is admitted, {n} wait: {reason}", "本步没有准入，{n} 个在等：{reason}"],
    "say.stop.others": ["nobody else is admitted, {n} wait: {reason}", "没有再准入别的请求，{n} 个在等：{reason}"],
    "say.discarded": ["a token was computed for nobody: it had ended", "白算了一个 token：请求已经结束"],
    "say.failed": ["the step failed: {error}", "本步失败：{error}"],
    "say.empty": ["nothing was computed", "没有计算任何 token"],
    "say.and": [", ", "、"],
    "say.block": ["block {blocks}", "块 {blocks}"],
    "say.blocks": ["blocks {blocks}", "块 {blocks}"],
    "say.many": ["{n} blocks ({blocks}, …)", "{n} 块（{blocks} 等）"],
    "say.host": ["{n} from host memory", "主机内存 {n} 块"],
    "say.disk": ["{n} from disk", "磁盘 {n} 块"],
    "say.store": ["{n} from a store", "外部存储 {n} 块"],
  });

  const {t} = Watch;
  const MOST_RANGES = 5;

  Watch.sayBlocks = (blocks) => {
    const ranges = Watch.blockRanges(blocks).split(", ");
    if (ranges.length > MOST_RANGES) {
      return t("say.many", {n: blocks.length, blocks: ranges.slice(0, MOST_RANGES).join(t("say.and"))});
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

  // What a request may do with blocks that it has just taken.
  const TAKERS = new Set(["table", "taken", "load_begun"]);

  // How each kind of event is said. `say(group, key, values, sources)` adds a sentence.
  const tell = {
    arrived(event, {say}) {
      say(event.request, "say.arrived", {n: event.prompt.length, most: event.max_tokens}, ["arrived"]);
    },
    queue(event, {say, run}) {
      const names = event.order.map(Watch.label);
      const order = names.length > 6 ? `${names.slice(0, 6).join(", ")}, …` : names.join(", ");
      say("", "say.queue", {order, policy: run.policy}, ["queue"]);
    },
    admitted(event, {say, state, run}) {
      const isBack = state.request(event.request).numPreemptions > 0;
      const n = event.num_cached_tokens;
      const blocks = Watch.sayBlocks(state.request(event.request).table.slice(0, n / run.block_size));
      const key = `say.${isBack ? "returned" : "admitted"}${n ? ".cached" : ""}`;
      say(event.request, key, {n, blocks}, n ? ["admitted", "matched"] : ["admitted"]);
    },
    preempted(event, {say, events, at, state, run}) {
      const lost = event.num_lost_tokens;
      const who = nextTaker(events, at + 1);
      const isSeat = events.slice(at).some(({kind, request}) => kind === "admitted" && request === who)
        && state.running.size >= run.max_num_seqs;
      const isForced = run.config.preempt_every && (state.numSteps + state.underWay.length + 1) % run.config.preempt_every === 0
        && !events.slice(0, at).some(({kind}) => kind === "taken" || kind === "preempted");
      const how = isForced ? ".forced" : isSeat ? ".seat" : who !== null && who !== event.request ? ".for" : "";
      const source = how === ".forced" ? "preempted:forced" : how === ".seat" ? "preempted:seat" : "preempted";
      say(event.request, `say.preempted${how}`, {lost, who: who === null ? "" : Watch.label(who)}, [source]);
    },
    finished(event, {say, state}) {
      const n = state.request(event.request).outputs.length;
      say(event.request, `say.finished.${event.reason}`, {n}, [`finished:${event.reason}`]);
    },
    cut(event, {say}) {
      say(event.request, "say.cut", {text: Watch.visible(event.stop_string)}, ["cut"]);
    },
    taken(event, {say, events, at}) {
      const next = events.slice(at + 1).find(({kind, request}) => TAKERS.has(kind) && request === event.request);
      const table = next?.kind === "table" ? next : undefined;
      const blocks = Watch.sayBlocks(event.blocks);
      if (!table?.blocks.length) say(event.request ?? "cache", "say.taken", {blocks}, ["taken"]);
      else say(event.request, "say.taken.table", {blocks, n: table.keep + table.blocks.length}, ["taken", "table"]);
    },
    shared(event, {say}) {
      say(event.request ?? "cache", "say.shared", {blocks: Watch.sayBlocks(event.blocks)}, ["shared"]);
    },
    freed(event, {say, state}) {
      const sorted = {free: [], cached: [], used: []};
      for (const block of event.blocks) {
        const left = state.refCnt[block] - 1;
        sorted[left === 0 ? "free" : left === 1 && state.cached.has(block) ? "cached" : "used"].push(block);
      }
      const parts = Object.entries(sorted).filter(([, blocks]) => blocks.length)
        .map(([how, blocks]) => t(`say.freed.${how}`, {blocks: Watch.sayBlocks(blocks)}));
      say(event.request ?? "cache", "say.freed", {blocks: parts.join(t("words.comma"))}, ["freed"]);
    },
    matched(event, {say, run}) {
      const values = {n: event.blocks.length * run.block_size, blocks: Watch.sayBlocks(event.blocks)};
      say(event.request ?? "cache", "say.matched", values, ["matched"]);
    },
    published(event, {say}) {
      const isNew = (block, i) => block === event.given[i];
      const added = event.kept.filter(isNew);
      if (added.length) {
        const blocks = Watch.sayBlocks(added);
        const hash = event.hashes[event.kept.indexOf(added[0])];
        if (added.length === 1 && hash) say(event.request, "say.published.hash", {blocks, hash}, ["published"]);
        else say(event.request, "say.published", {blocks}, ["published"]);
      }
      event.kept.forEach((kept, i) => {
        if (isNew(kept, i)) return;
        const values = {given: Watch.sayBlocks([event.given[i]]), kept: Watch.sayBlocks([kept])};
        say(event.request, "say.known", values, ["published:known", "table:moved"]);
      });
    },
    split(event, {say}) {
      say("cache", "say.split", {blocks: Watch.sayBlocks([event.block])}, ["split"]);
    },
    evicted(event, {say, events, at}) {
      const who = nextTaker(events, at + 1);
      const values = {blocks: Watch.sayBlocks(event.blocks), who: who === null ? "" : Watch.label(who)};
      say("cache", who === null ? "say.evicted" : "say.evicted.for", values, ["evicted"]);
    },
    load_begun(event, {say}) {
      say(event.request, "say.load_begun", {blocks: Watch.sayBlocks(event.blocks)}, ["load_begun"]);
    },
    loaded(event, {say}) {
      const sources = Object.entries(event.sources).map(([name, n]) => t(`say.${name}`, {n})).join(t("words.comma"));
      if (!event.blocks.length) say(event.request, "say.loaded.nothing", {}, ["loaded"]);
      else say(event.request, "say.loaded", {blocks: Watch.sayBlocks(event.blocks), sources}, ["loaded"]);
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
      else say(id, "say.passed_over", {reason: t(`reason.${reason}`)}, [`reason:${reason}`]);
    }
    if (event.stop === null) return;
    const [reason, at] = event.stop;
    const others = state.waiting.filter((id) => id !== at && !(id in event.passed_over)).length;
    // At nobody: admission ended behind the last who was admitted, or never began.
    const isLate = events.slice(0, now).some(({kind}) => kind === "admitted");
    const how = at !== "" ? "" : isLate ? "others" : "nobody";
    const key = how ? `say.stop.${how}` : others ? "say.stop.behind" : "say.stop";
    const special = `reason:${reason}:${how}`;
    const source = how && Watch.sourceOf(run, special) ? special : `reason:${reason}`;
    say("", key, {who: Watch.label(at), n: others, reason: t(`reason.${reason}`)}, [source]);
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
        say(id, "say.guesses", {accepted, n: accepted + rejected}, ["guesses"]);
        if (rejected) say(id, "say.rejected", {n: rejected}, ["guesses:rejected"]);
      } else if (event.tokens[id]?.length === 1 && cells.every(({kind}) => kind === "decode")) {
        say(id, "say.decode", {}, ["computed"], true);
      }
    }
    for (const id of Object.keys(event.discarded)) say(id, "say.discarded", {}, ["discarded"]);
    if (facts.cells.size === 0) say("", "say.empty", {}, ["planned"]);
  }

  Watch.sentencesOf = ({film, step, facts}) => {
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
  };

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
      const first = isPlace ? ordered.findIndex(({group, key}) => group === sentence.group && key === "say.taken.table") : -1;
      ordered.splice(first < 0 ? ordered.length : first, 0, sentence);
    }
    return ordered;
  }
})();
