"use strict";
// Two films side by side: where they differ first. What they do is compared, and not how long it
// took.
(() => {
  const {store, t, h} = Watch;
  Watch.words({
    "compare.same": ["Both films show the same, in all {n} steps.", "两次运行的 {n} 步完全相同。"],
    "compare.from": [
      "The films are alike up to step {before}. In step {step}, left: {left}; right: {right}.",
      "到第 {before} 步，两次运行完全相同。第 {step} 步，左：{left}；右：{right}。"],
    "compare.at_once": ["The films differ from step 0 on. Left: {left}; right: {right}.",
      "两次运行从第 0 步起就不同。左：{left}；右：{right}。"],
    "compare.text": [
      "The text of {request} differs from its token {n} on. Left: “{left}”; right: “{right}”.",
      "{request} 的文本从第 {n} 个 token 起不同。左：“{left}”；右：“{right}”。"],
    "compare.same_text": ["Every text is the same.", "生成的文本全都相同。"],
    "compare.same_of_both": ["The texts of all that both have are the same.",
      "两边都有的请求，生成的文本全都相同。"],
    "compare.only_left": ["Only the left film has {requests}.", "只有左边的运行有 {requests}。"],
    "compare.only_right": ["Only the right film has {requests}.", "只有右边的运行有 {requests}。"],
    "compare.none_shared": ["No request is in both.", "没有两边都有的请求。"],
    "compare.go": ["Go there", "跳到那里"],
    "compare.end": ["(its end)", "（结束）"],
    "compare.over": ["{label} (ended at step {last})", "{label}（到第 {last} 步结束）"],
  });

  // And what is made of times (a key of the queue) or says nothing about what happens (a hash).
  const TIMED = new Set([
    "time", "schedule_ms", "times", "update_ms", "started_at", "order_key", "hashes",
  ]);
  const untimed = (event) =>
    JSON.stringify(event, (key, value) => (TIMED.has(key) ? undefined : value));

  // {step, left, right}: the first pair of events that differ; null if no step has such a pair.
  function firstDifference(left, right) {
    const num = Math.max(left.numSteps, right.numSteps);
    for (let step = 0; step < num; step++) {
      const [a, b] = [left.steps[step]?.events ?? [], right.steps[step]?.events ?? []];
      for (let i = 0; i < Math.max(a.length, b.length); i++) {
        if (a[i] === undefined || b[i] === undefined || untimed(a[i]) !== untimed(b[i])) {
          return {step, left: a[i], right: b[i]};
        }
      }
    }
    return null;
  }

  // {request, n, left, right}: the first token, in order of arrival, that is another one.
  function firstOtherToken(left, right) {
    const [a, b] = [left, right].map((film) => film.stateAfter(film.numSteps - 1).requests);
    for (const [id, one] of a) {
      const other = b.get(id);
      if (other === undefined) continue;
      const num = Math.max(one.outputs.length, other.outputs.length);
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
  const names = (ids) => ids.slice(0, MOST_NAMES).map(Watch.name).join(", ")
    + (ids.length > MOST_NAMES ? ", …" : "");

  // What can be said of the texts: first, who has none to be compared with.
  function textWords({token, onlyLeft, onlyRight, numShared}) {
    const said = [];
    if (onlyLeft.length) said.push(t("compare.only_left", {requests: names(onlyLeft)}));
    if (onlyRight.length) said.push(t("compare.only_right", {requests: names(onlyRight)}));
    const isWhole = said.length === 0;
    const end = t("compare.end");
    if (token !== null) {
      said.push(t("compare.text", {request: Watch.name(token.request), n: token.n + 1,
        left: token.left ?? end, right: token.right ?? end}));
    } else if (isWhole) said.push(t("compare.same_text"));
    else said.push(t(numShared ? "compare.same_of_both" : "compare.none_shared"));
    return said.join(" ");
  }

  const tokenWords = (request, n) =>
    n < request.outputs.length ? request.pieces[n] ?? String(request.outputs[n]) : null;

  const line = h("span");
  const text = h("span");
  const go = h("button", {onclick: () => Watch.set({step: found.difference.step})});
  const bar = h("p", {class: "compare", hidden: true, role: "status"}, line, " ", go, " ", text);
  let found = {};

  function draw() {
    bar.hidden = store.films.length < 2;
    if (bar.hidden) return;
    if (found.films !== store.films) {
      const [left, right] = store.films;
      const difference = firstDifference(left, right);
      const [onlyLeft, onlyRight] = [idsBeside(left, right), idsBeside(right, left)];
      found = {films: store.films, difference, token: firstOtherToken(left, right),
        onlyLeft, onlyRight, numShared: left.byId.size - onlyLeft.length};
    }
    const {difference} = found;
    go.hidden = difference === null;
    Watch.say(go, t("compare.go"));
    Watch.say(line, difference === null ? t("compare.same", {n: Watch.numSteps()})
      : t(difference.step ? "compare.from" : "compare.at_once", {
        step: difference.step, before: difference.step - 1,
        left: Watch.eventWords(difference.left), right: Watch.eventWords(difference.right)}));
    Watch.say(text, textWords(found));
  }

  Watch.compare = {bar, draw, firstDifference, firstOtherToken};
})();
