// What happened in a step, as sentences: [{group, key, values, sources, isRoutine}]. `group` is a
// request, or "" for what concerns the step, or "cache". `sources` name places in the source.
const F = Watch.frames;
const {t} = Watch;
const MOST_RANGES = 5;
const MOST_NAMES = 6;

Watch.sayBlocks = (blocks) => {
  const ranges = Watch.blockRanges(blocks).split(", ");
  const named = ranges.slice(0, MOST_RANGES).join(t("say.and"));
  if (ranges.length > MOST_RANGES) return t("say.many", {n: blocks.length, blocks: named});
  return t(blocks.length === 1 ? "say.block" : "say.blocks", {blocks: named});
};

// Tells what led from one frame to the next one.
class Teller {
  sentences = [];

  constructor(view) {
    Object.assign(this, {film: view.film, run: view.film.run, facts: view.facts});
  }

  // The place in the source is named as the sentence, where nothing else is said.
  say(group, key, values = {}, sources = [key.split(".")[0]]) {
    const isRoutine = key === "decode";
    this.sentences.push({group, key: `say.${key}`, values, sources, isRoutine});
  }

  tell(what, before, after) {
    Object.assign(this, {what, before, after});
    if (what.at === "start") {
      const values = {running: after.running.length, waiting: after.waiting.length};
      this.say("", "snapshot", values);
      return;
    }
    for (const id of what.arrived) this.tellArrived(id);
    this.tellQueue();
    for (const row of what.preempted) this.tellPreempted(...row);
    this.tellEvicted();
    for (const block of what.split) this.say("cache", "split", blocksOf([block]));
    const {plan} = what;
    if (what.result?.times) {
      this.tellComputed();
      const computed = this.run.windows.length ? [] : this.facts.plan?.requests ?? [];
      computed.forEach((id) => this.tellGivenBack(id));
    }
    for (const id of this.inOrder()) this.tellRequest(id);
    if (plan) this.tellWaiting(plan);
    if (what.at === "failed") this.say("", "failed", {error: what.result.error});
  }

  // Whose tables, blocks or place changed: those of the plan first.
  inOrder() {
    const {plan, taken, shared, freed, begun, loaded, finished, published, known} = this.what;
    const ids = [...Object.keys({...freed, ...taken, ...shared}), ...finished];
    for (const rows of [plan?.admitted ?? [], begun, loaded, published, known]) {
      ids.push(...rows.map(([id]) => id));
    }
    ids.push(...this.what.loads_ended);
    const planned = (plan ?? this.facts.plan)?.requests ?? [];
    const there = new Set(ids);
    return new Set([...planned.filter((id) => there.has(id)), ...ids]);
  }

  tellArrived(id) {
    const request = this.after.requests[id];
    this.say(id, "arrived", {n: request.prompt.length, most: request.max_tokens});
    const what = Watch.brings(request);
    if (what) this.say(id, "brings", {what}, ["arrived"]);
  }

  // Where it is not the order of arrival, with those that were preempted before all others.
  tellQueue() {
    const {what, before, after} = this;
    const back = what.preempted.map(([id]) => id).reverse();
    const expected = new Set([...back, ...before.waiting, ...what.arrived]);
    const isThere = new Set(after.waiting);
    const there = [...expected].filter((id) => isThere.has(id));
    if (there.every((id, i) => id === after.waiting[i])) return;
    const order = Watch.firstOf(after.waiting.map(Watch.label), MOST_NAMES);
    this.say("", "queue", {order, policy: this.run.policy});
  }

  tellPreempted(id, lost, who) {
    const {run, before, what: {plan}} = this;
    const every = run.config.preempt_every;
    const isDue = every && who === null && (plan.step + 1) % every === 0;
    const takesSeat = before.running.length >= run.max_num_seqs
      && plan.admitted.some(([one]) => one === who);
    const how = isDue ? "forced" : takesSeat ? "seat" : who !== null && who !== id ? "for" : "";
    const source = how === "" || how === "for" ? "preempted" : `preempted:${how}`;
    const values = {lost, who: who === null ? "" : Watch.label(who)};
    this.say(id, how ? `preempted.${how}` : "preempted", values, [source]);
  }

  // Which request got each evicted block: for it, all of them at once.
  tellEvicted() {
    const takers = new Map(Object.entries(this.what.taken)
      .flatMap(([id, blocks]) => blocks.map((block) => [block, id])));
    const byTaker = Map.groupBy(this.what.evicted, (block) => takers.get(block));
    for (const [who, blocks] of byTaker) {
      const how = this.run.windows.length ? ".taken" : who === undefined ? "" : ".for";
      const values = {...blocksOf(blocks), who: who === undefined ? "" : Watch.label(who)};
      this.say("cache", `evicted${how}`, values);
    }
  }

  // What happened to one request and its blocks.
  tellRequest(id) {
    const {what, after} = this;
    const admitted = what.admitted.find(([one]) => one === id);
    if (admitted) this.tellAdmitted(...admitted);
    const blocks = (rows) => rows.find(([one]) => one === id)?.[1];
    const shared = what.shared[id];
    if (shared && !admitted?.[1]) this.say(id, "shared", blocksOf(shared));
    if (what.plan) this.tellFreed(id); // what no token to come sees
    const begun = blocks(what.begun);
    this.tellTaken(id, what.taken[id] ?? begun ?? []);
    if (begun) this.say(id, "load_begun", blocksOf(begun));
    const loaded = blocks(what.loaded);
    const sources = what.sources.map(([name, n]) => t(`say.${name}`, {n})).join(t("list.comma"));
    if (loaded?.length) this.say(id, "loaded", {...blocksOf(loaded), sources});
    else if (loaded) this.say(id, "loaded.nothing");
    if (what.loads_ended.includes(id)) this.say(id, "load_ended");
    this.tellPublished(id, blocks(what.published) ?? []);
    for (const [one, given, kept] of what.known) {
      if (one === id) this.tellKnown(id, "known", given, kept, ["published:known", "table:moved"]);
    }
    if (!what.plan) this.tellFreed(id);
    if (!what.finished.includes(id)) return;
    const {reason, stop_reason: text, text_length: length} = after.requests[id].finish;
    if (length !== null && reason === "stop") this.say(id, "cut", {text: Watch.visible(text)});
    else {
      const n = after.outputs[id].length;
      this.say(id, `finished.${reason}`, {n}, [`finished:${reason}`]);
    }
  }

  tellAdmitted(id, n, isBack) {
    const table = F.request(this.after, id)?.tables[0] ?? [];
    const {blocks} = blocksOf(table.slice(0, Math.ceil(n / this.run.block_size)));
    const key = `${isBack ? "returned" : "admitted"}${n ? ".cached" : ""}`;
    this.say(id, key, {n, blocks}, n ? ["admitted", "matched"] : ["admitted"]);
    if (!this.run.windows.length || !n) return;
    const found = this.what.hits.get(id);
    for (const [group, blocks] of Object.entries(this.after.tables[id])) {
      const own = blocks.filter((block) => found.includes(block));
      this.say(id, "matched.group", {...blocksOf(own), group});
    }
  }

  tellTaken(id, blocks) {
    if (!blocks.length) return;
    const n = this.after.tables[id]?.[0]?.length;
    if (!n || this.run.windows.length) this.say(id, "taken", blocksOf(blocks));
    else this.say(id, "taken.table", {...blocksOf(blocks), n}, ["taken", "table"]);
  }

  tellPublished(id, blocks) {
    const {cached} = this.after;
    const byGroup = Map.groupBy(blocks, (block) => cached[block].group ?? 0);
    for (const [group, some] of byGroup) {
      const {hash} = cached[blocks[0]];
      const how = this.run.windows.length ? ".group" : some.length === 1 && hash ? ".hash" : "";
      this.say(id, `published${how}`, {...blocksOf(some), group, hash});
    }
  }

  tellKnown(id, key, given, kept, sources) {
    const values = {given: Watch.sayBlocks([given]), kept: Watch.sayBlocks([kept])};
    this.say(id, key, values, sources);
  }

  // A block that the request gave back for a cached one with its content, in the update in which it
  // ended; or in which its table did not change, as it should.
  tellGivenBack(id) {
    const {what, before, after, run: {block_size: size}} = this;
    const request = F.request(after, id);
    const tokens = request ? [...request.prompt, ...request.outputs] : [];
    for (const [place, given] of before.tables[id]?.[0]?.entries() ?? []) {
      const end = (place + 1) * size;
      const isGivenBack = given in before.refs && !(given in after.refs);
      if (end > request.numComputed || !isGivenBack || given in before.cached) continue;
      const prefix = tokens.slice(0, end).join();
      const kept = F.cachedBlocks(after).find((one) => F.prefixOf(after, one).join() === prefix);
      if (kept === undefined || what.known.some(([, one]) => one === given)) continue;
      const key = request.finish ? "known.ended" : "known.stays";
      this.tellKnown(id, key, given, kept, ["published:known"]);
    }
  }

  // What became of them. One that another request took at once had been free.
  tellFreed(id) {
    const {what, before, after, film: {cacheRefs}} = this;
    if (!what.freed[id]) return;
    const isTaken = new Set(Object.values(what.taken).flat());
    const stateOf = (block) => {
      if (isTaken.has(block)) return block in before.cached ? "cached" : "free";
      const refs = after.refs[block] ?? 0;
      return block in after.cached && refs === cacheRefs ? "cached" : refs ? "used" : "free";
    };
    const byState = Map.groupBy(what.freed[id], stateOf);
    const parts = ["free", "cached", "used"].filter((how) => byState.has(how))
      .map((how) => t(`say.freed.${how}`, blocksOf(byState.get(how))));
    this.say(id, "freed", {blocks: parts.join(t("list.comma"))});
  }

  // Why the others wait: each that was skipped, and the stop for all who stand behind it.
  tellWaiting({skipped, parents, stop, admitted}) {
    const {run, after} = this;
    for (const [id, reason] of Object.entries(skipped)) {
      const who = parents[id];
      const words = {reason: Watch.reasonWords(run, reason)};
      if (who === undefined) this.say(id, "passed_over", words, [`reason:${reason}`]);
      else this.say(id, "parent", {who: Watch.label(who)}, ["reason:parent"]);
    }
    if (stop === null) return;
    const [reason, at] = stop;
    const n = after.waiting.filter((id) => id !== at && !(id in skipped)).length;
    // At nobody: admission ended behind the last who was admitted, or never began.
    const how = at !== "" ? "" : admitted.length ? "others" : "nobody";
    const key = how ? `stop.${how}` : n ? "stop.behind" : "stop";
    const special = `reason:${reason}:${how}`;
    const source = how && Watch.sourceOf(run, special) ? special : `reason:${reason}`;
    const values = {who: Watch.label(at), n, reason: Watch.reasonWords(run, reason)};
    this.say("", key, values, [source]);
  }

  // What the step computed of each request, by kinds of tokens.
  tellComputed() {
    const {after, what: {tokens, result: {verified, discarded}}, facts: {cells}} = this;
    for (const [id, parts] of cells) {
      for (const {kind, start, numTokens: n} of parts) {
        const left = (after.requests[id]?.prompt.length ?? 0) - start - n;
        if (kind === "prompt" && left > 0) this.say(id, "chunk", {n, left});
        else if (kind === "prompt") this.say(id, "prompt", {n}, ["planned"]);
        else if (kind === "recomputed") this.say(id, "again", {n}, ["planned"]);
      }
      if (verified[id]) {
        const [accepted, rejected] = verified[id];
        this.say(id, "drafts", {accepted, n: accepted + rejected});
        if (rejected) this.say(id, "rejected", {n: rejected}, ["drafts:rejected"]);
      } else if (tokens[id]?.length === 1 && parts.every(({kind}) => kind === "decode")) {
        this.say(id, "decode", {}, ["computed"]);
      }
    }
    for (const id of Object.keys(discarded)) this.say(id, "discarded");
    if (cells.size === 0) this.say("", "empty", {}, ["planned"]);
  }
}

const blocksOf = (blocks) => ({blocks: Watch.sayBlocks(blocks)});

Watch.sentencesOf = Watch.ofStep((view) => {
  const {film, step, facts} = view;
  const teller = new Teller(view);
  const {scheduler, policy} = film.run;
  if (step === 0 && facts) teller.say("", "run", {scheduler, policy});
  facts?.frames.forEach((what, i) => teller.tell(
    what, film.frameBehind(facts.first + i), film.frameBehind(facts.first + i + 1)));
  return teller.sentences;
});
