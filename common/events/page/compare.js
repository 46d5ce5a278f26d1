// Two films side by side: where they differ first. What they do is compared, and not how long it
// took.
const {store, t, h} = Watch;
Watch.words({
  "compare.same": ["Both films show the same, in all {n} steps.", "两次运行的 {n} 步完全相同。"],
  "compare.from": ["Alike up to step {before}. Step {step}, left | right: {facts}.",
    "到第 {before} 步为止相同。第 {step} 步，左 | 右：{facts}。"],
  "compare.at_once": ["They differ from step 0 on, left | right: {facts}.",
    "从第 0 步起就不同，左 | 右：{facts}。"],
  "compare.fact": ["{what}: {left} | {right}", "{what}：{left} | {right}"],
  "compare.event": ["only a detail of a frame: {left} | {right}", "只有某一帧的细节不同：{left} | {right}"],
  "compare.gone": ["(over)", "（已结束）"],
  "fact.waits": ["waits", "等待"],
  "fact.runs": ["runs", "运行"],
  "fact.ended": ["has ended", "已结束"],
  "fact.absent": ["is not there", "不在"],
  "fact.plan": ["tokens of {request} in the step", "{request} 本步的 token 数"],
  "fact.table": ["{request}'s table", "{request} 的块表"],
  "fact.outputs": ["outputs of {request}", "{request} 的输出"],
  "fact.found": ["tokens found for {request}", "{request} 命中的 token 数"],
  "fact.queue": ["the queue", "队列"],
  "fact.why": ["why {request} waits", "{request} 等待的原因"],
  "fact.free": ["the free blocks, the next to be taken first", "空闲块（按取用顺序）"],
  "fact.cached": ["cached blocks", "缓存的块"],
  "fact.refs": ["references of blocks", "块的引用计数"],
  "fact.nodes": ["nodes", "节点"],
  "compare.text": [
    "The text of {request} differs from its token {n} on. Left: “{left}”; right: “{right}”.",
    "{request} 的文本从第 {n} 个 token 起不同。左：“{left}”；右：“{right}”。"],
  "compare.same_text": ["Every text is the same.", "生成的文本全都相同。"],
  "compare.same_of_both": ["The texts of all that both have are the same.", "两边都有的请求，生成的文本全都相同。"],
  "compare.only_left": ["Only the left film has {requests}.", "只有左边的运行有 {requests}。"],
  "compare.only_right": ["Only the right film has {requests}.", "只有右边的运行有 {requests}。"],
  "compare.none_shared": ["No request is in both.", "没有两边都有的请求。"],
  "compare.go": ["Go there", "跳到那里"],
  "compare.end": ["(its end)", "（结束）"],
  "compare.over": ["{label} (ended at step {last})", "{label}（到第 {last} 步结束）"],
});

// And what is made of times (a key of the queue) or says nothing about what happens (a hash).
const TIMED = new Set(["time", "schedule_ms", "times", "update_ms", "arrived_at", "order_key",
  "hash"]);
const untimed = (line) =>
  JSON.stringify(line, (key, value) => (TIMED.has(key) ? undefined : value));

// {step, left, right}: the first pair of lines that differ; null if no step has such a pair.
function firstDifference(left, right) {
  const place = [...left.lines, ...right.lines].findIndex((_, i) =>
    untimed(left.lines[i]) !== untimed(right.lines[i]));
  const has = ({first, end}) => first <= place && place < end;
  const step = (left.steps.find(has) ?? right.steps.find(has))?.number;
  return step === undefined ? null : {step, left: left.lines[place], right: right.lines[place]};
}

const MOST_FACTS = 2;
const MOST_ITEMS = 12;
const list = (items) => Watch.firstOf(items, MOST_ITEMS) || t("list.none");

// What there is to say of a film after a step, fact by fact: Map(what -> text). What a step does
// to a request stands before what it does to the memory.
function factsAfter(film, step, ids) {
  const state = film.stateAfter(step);
  const {plan} = film.steps[step];
  const of = (id) => film.requestIn(state, id, step);
  const placeOf = (id) => (of(id) === undefined ? "absent" : of(id).finish ? "ended"
    : state.running.includes(id) ? "runs" : "waits");
  const waits = film.waits(step);
  const each = {
    place: (id) => t(`fact.${placeOf(id)}`),
    plan: (id) => plan?.num_tokens[plan.requests.indexOf(id)] ?? 0,
    table: (id) => list(of(id)?.tables.flat() ?? []),
    outputs: (id) => of(id)?.outputs.length ?? 0,
    found: (id) => of(id)?.num_cached ?? 0,
    why: (id) => (waits.has(id) ? Watch.reasonWords(film.run, waits.get(id)) : ""),
  };
  const lists = {
    queue: state.waiting.map(Watch.name),
    free: state.free,
    cached: Object.keys(state.cached),
    refs: Object.entries(state.refs).filter(([, n]) => n > 1).map(([block, n]) => `${block}×${n}`),
    nodes: Object.keys(state.cached).filter((block) => state.cached[block].begins_node),
  };
  const ofRequests = Object.entries(each).flatMap(([key, textOf]) => [...ids].map((id) =>
    [key === "place" ? Watch.name(id) : t(`fact.${key}`, {request: Watch.name(id)}), textOf(id)]));
  const ofAll = Object.entries(lists).map(([key, items]) => [t(`fact.${key}`), list(items)]);
  return new Map([...ofRequests, ...ofAll].map(([what, text]) => [what, String(text)]));
}

// The first facts that differ, in words.
function factWords([left, right], {step, left: one, right: other}) {
  const words = ({numSteps}) => (step < numSteps ? t("clock.step", {n: step}) : t("compare.gone"));
  if (step >= Math.min(left.numSteps, right.numSteps)) return `${words(left)} | ${words(right)}`;
  const ids = new Set([...left.byId.keys(), ...right.byId.keys()]);
  const [a, b] = [left, right].map((film) => factsAfter(film, step, ids));
  const said = [...a].filter(([what, text]) => text !== b.get(what)).slice(0, MOST_FACTS)
    .map(([what, text]) => t("compare.fact", {what, left: text, right: b.get(what)}));
  if (said.length) return said.join("; ");
  return t("compare.event", {left: one?.at ?? "–", right: other?.at ?? "–"});
}

// {request, n, left, right}: the first token, in order of arrival, that is another one.
function firstOtherToken(left, right) {
  const ofEnd = (film, id) => film.requestIn(film.now, id, Infinity);
  for (const {id} of left.requests) {
    const [one, other] = [ofEnd(left, id), ofEnd(right, id)];
    const num = other ? Math.max(one.outputs.length, other.outputs.length) : 0;
    for (let n = 0; n < num; n++) {
      if (one.outputs[n] !== other.outputs[n]) {
        return {request: id, n, left: tokenWords(one, n), right: tokenWords(other, n)};
      }
    }
  }
  return null;
}

const MOST_NAMES = 6;
const idsBeside = (film, other) => [...film.byId.keys()].filter((id) => !other.byId.has(id));
const names = (ids) => Watch.firstOf(ids.map(Watch.name), MOST_NAMES);

// What can be said of the texts: first, who has none to be compared with.
function textWords({token, onlyLeft, onlyRight, numShared}) {
  const isWhole = onlyLeft.length + onlyRight.length === 0;
  const end = t("compare.end");
  const same = isWhole ? "same_text" : numShared ? "same_of_both" : "none_shared";
  return [
    onlyLeft.length && t("compare.only_left", {requests: names(onlyLeft)}),
    onlyRight.length && t("compare.only_right", {requests: names(onlyRight)}),
    token === null ? t(`compare.${same}`) : t("compare.text", {request: Watch.name(token.request),
      n: token.n + 1, left: token.left ?? end, right: token.right ?? end}),
  ].filter(Boolean).join(" ");
}

const tokenWords = (request, n) =>
  n < request.outputs.length ? request.pieces[n] ?? String(request.outputs[n]) : null;

const line = h("span");
const text = h("span");
const go = h("button", {says: "compare.go",
  onclick: () => Watch.set({step: comparison(store.films).difference.step})});
const bar = h("p", {class: "compare", hidden: true, role: "status"}, line, " ", go, " ", text);
const comparison = Watch.ofFilm(([left, right]) => {
  const [onlyLeft, onlyRight] = [idsBeside(left, right), idsBeside(right, left)];
  return {difference: firstDifference(left, right), token: firstOtherToken(left, right),
    onlyLeft, onlyRight, numShared: left.byId.size - onlyLeft.length};
});

function draw() {
  bar.hidden = store.films.length < 2 || Watch.isAsking();
  if (bar.hidden) return;
  const {difference} = comparison(store.films);
  go.hidden = difference === null;
  Watch.say(line, difference === null ? t("compare.same", {n: Watch.numSteps()})
    : t(difference.step ? "compare.from" : "compare.at_once", {
      step: difference.step, before: difference.step - 1,
      facts: factWords(store.films, difference)}));
  Watch.say(text, textWords(comparison(store.films)));
}

Watch.compare = {bar, draw, firstDifference};
