"use strict";
// The steps to which [ and ] jump: where something happened that is not the daily course of things.
// They stand as ticks below the scrubber.
(() => {
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
    "moment.wrong": ["the events contradict themselves", "事件自相矛盾"],
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
    const preempted = new Set();
    const rare = find(film, (event) => sayings(event, preempted));
    return rare.length ? rare : find(film, comings);
  }

  function find(film, say) {
    const found = film.steps.map(({number, events}) => ({step: number, says: events.flatMap(say)}));
    if (film.contradiction) found[film.contradiction.step].says.push(["wrong", {}]);
    return withoutCommon(found, film.numSteps).filter(({says}) => says.length > 0);
  }

  function comings(event) {
    const request = Watch.name(event.request ?? "");
    if (event.kind === "admitted") return [["begun", {request}]];
    return event.kind === "finished" ? [["ended", {request, reason: event.reason}]] : [];
  }

  function sayings(event, preempted) {
    const request = Watch.name(event.request ?? "");
    switch (event.kind) {
      case "preempted":
        preempted.add(event.request);
        return [["preempted", {request}]];
      case "admitted":
        if (preempted.delete(event.request)) return [["returned", {request}]];
        return event.num_cached_tokens ? [["found", {request, n: event.num_cached_tokens}]] : [];
      case "finished":
        if (!["abort", "error"].includes(event.reason)) return [];
        return [["ended", {request, reason: event.reason}]];
      case "evicted": case "split": case "loaded": case "failed":
        return [[event.kind, {}]];
      default:
        return [];
    }
  }

  const known = new WeakMap();
  const of = (film) => known.get(film) ?? known.set(film, momentsOf(film)).get(film);
  Watch.momentsOf = of;
  Watch.sayMoment = ({says}, most = 4) => {
    const sentences = says.map(([key, values]) => Watch.t(`moment.${key}`, values));
    return [...new Set(sentences)].slice(0, most).join(store.language === "zh" ? "；" : "; ");
  };
  Watch.moments = () => {
    const steps = new Map();
    for (const film of store.films) {
      for (const {step, says} of of(film)) steps.set(step, [...(steps.get(step) ?? []), ...says]);
    }
    return [...steps].sort(([a], [b]) => a - b).map(([step, says]) => ({step, says}));
  };

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
  let drawn = null; // for which films, and how wide

  function draw() {
    const {width} = size;
    if (drawn?.films === store.films && drawn.width === width) return;
    drawn = {films: store.films, width};
    const pen = Watch.sized(canvas, width, HEIGHT);
    pen.fillStyle = Watch.plain("var(--ink)");
    const last = Math.max(1, Watch.numSteps() - 1);
    for (const {step} of Watch.moments()) {
      pen.fillRect(HALF_THUMB + ((width - 2 * HALF_THUMB) * step) / last - 1, 0, 2, HEIGHT);
    }
  }

  Watch.momentTicks = {frame, draw};
})();
