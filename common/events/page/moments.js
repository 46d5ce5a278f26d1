// The steps to which [ and ] jump: where something happened that is not the daily course of
// things. They stand as ticks below the scrubber.
const {store, h} = Watch;
Watch.words({
  "moment.begun": ["{request} begins", "{request} 开始运行"],
  "moment.preempted": ["{request} was preempted", "{request} 被抢占"],
  "moment.returned": ["{request} came back", "{request} 回来了"],
  "moment.evicted": ["blocks were evicted", "有块被淘汰"],
  "moment.split": ["a node was split", "有节点被拆分"],
  "moment.loaded": ["KV was loaded", "KV 加载完成"],
  "moment.failed": ["the step failed", "这一步失败了"],
  "moment.found": ["{request} found {n} tokens in the cache", "{request} 在缓存里找到 {n} 个 token"],
  "moment.ended": ["{request} ended: {reason}", "{request} 结束：{reason}"],
  "moment.wrong": ["the record contradicts itself", "记录自相矛盾"],
});

// What happens in more than a fifth of all steps is the daily course. A small cache evicts at
// every turn, and a key that stops at each of them would be the right arrow.
const COMMON = 0.2;
const FEW = 5; // unless there are no more than so many

function withoutCommon(moments, numSteps) {
  const counts = new Map();
  for (const {says} of moments) {
    const keys = new Set(says.map(([key]) => key));
    for (const key of keys) counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  const isRare = ([key]) => counts.get(key) <= Math.max(FEW, COMMON * numSteps);
  return moments.map(({step, says}) => ({step, says: says.filter(isRare)}));
}

// [{step, says: [[key, values]]}], in order. Where nothing else happens, somebody comes or goes.
function momentsOf(film) {
  const rare = find(film, sayings);
  return rare.length ? rare : find(film, comings);
}

function find(film, say) {
  const found = film.steps.map(({number, frames}) =>
    ({step: number, says: frames.flatMap(say)}));
  if (film.contradiction) found[film.contradiction.step].says.push(["wrong", {}]);
  return withoutCommon(found, film.numSteps).filter(({says}) => says.length > 0);
}

const reasonOf = ({line}, id) => {
  const row = line.changes.requests[id]; // a new one, or what changed of it
  return row.finish?.[0].reason ?? row[0].finish.reason;
};
const endsOf = (what) => what.finished.map((id) =>
  ["ended", {request: Watch.name(id), reason: reasonOf(what, id)}]);
const comings = (what) =>
  [...what.admitted.map(([id]) => ["begun", {request: Watch.name(id)}]), ...endsOf(what)];

function sayings(what) {
  const says = [];
  for (const [id] of what.preempted) says.push(["preempted", {request: Watch.name(id)}]);
  for (const kind of ["evicted", "split", "loaded"]) if (what[kind].length) says.push([kind, {}]);
  for (const [id, n, isBack] of what.admitted) {
    if (isBack) says.push(["returned", {request: Watch.name(id)}]);
    else if (n) says.push(["found", {request: Watch.name(id), n}]);
  }
  if (what.at === "failed") says.push(["failed", {}]);
  return [...says, ...endsOf(what).filter(([, {reason}]) => ["abort", "error"].includes(reason))];
}

Watch.momentsOf = Watch.ofFilm(momentsOf);
Watch.sayMoment = ({says}, most = 4) => {
  const sentences = says.map(([key, values]) => Watch.t(`moment.${key}`, values));
  return [...new Set(sentences)].slice(0, most).join(Watch.t("list.and"));
};
const momentsOfAll = Watch.ofFilm((films) => {
  const bySteps = Map.groupBy(films.flatMap(Watch.momentsOf), ({step}) => step);
  return [...bySteps].sort(([a], [b]) => a - b).map(([step, moments]) =>
    ({step, says: moments.flatMap(({says}) => says)}));
});
Watch.moments = () => momentsOfAll(store.films);

Watch.nextMoment = (direction) => {
  const steps = Watch.moments().map(({step}) => step);
  const next = direction > 0
    ? steps.find((step) => step > store.step) : steps.findLast((step) => step < store.step);
  if (next !== undefined) Watch.set({step: next});
};

// What is worth a sentence about the step shown: for the live region.
Watch.momentWords = () => {
  const moment = Watch.moments().find(({step}) => step === store.step);
  return moment ? Watch.sayMoment(moment) : "";
};

// -- the ticks. A thumb's middle is half a thumb away from the ends of a range input.

const HALF_THUMB = 8;
const canvas = h("canvas", {"aria-hidden": "true"});
const HEIGHT = 8;
const frame = h("div", {class: "moments"}, canvas);
const size = Watch.sizeOf(frame);
function draw() {
  const {width} = size;
  const pen = Watch.sized(canvas, width, HEIGHT);
  const last = Math.max(1, Watch.numSteps() - 1);
  for (const {step} of Watch.moments()) {
    const at = HALF_THUMB + ((width - 2 * HALF_THUMB) * step) / last;
    Watch.fillBox(pen, "var(--ink)", at - 1, 0, 2, HEIGHT);
  }
}

Watch.momentTicks = {frame, draw};
