// The tokens of a request as text: prompt against output, what this step computed and brought, and
// draft tokens: underlined if they were accepted, struck out if they were rejected.
Watch.words({
  "tokens.title": ["{request}: prompt {prompt}, outputs {outputs}",
    "{request}：prompt {prompt}，输出 {outputs}"],
  "tokens.later": ["{request} has not arrived yet.", "{request} 还没有到达。"],
  "tokens.elsewhere": ["{request} is not in this run.", "{request} 不在本次运行中。"],
  "tokens.all": ["Tokens of this step; choose a request to see all of its text.",
    "本步的 token；选定一个请求可看全文。"],
  "tokens.more": ["and {n} more requests", "另有 {n} 个请求"],
  "tokens.gap": ["{n} more", "略 {n} 个"],
  "tokens.output": ["output", "输出"],
  "tokens.now": ["this step", "本步"],
});

const {h, t} = Watch;
const MAX_ROWS = 14; // requests, when none is chosen
const [HEAD, AROUND, TAIL, MOST_LIT] = [16, 10, 40, 160]; // tokens that are shown of a long text

// Which outputs were draft tokens: number of a request -> set of output indices, in the whole
// film.
const acceptedIn = Watch.ofFilm((film) => {
  const [found, numbers, counts] = [new Map(), new Map(), new Map()];
  for (const {line: {changes}, result} of film.steps.flatMap(({frames}) => frames)) {
    for (const [id, row] of Object.entries(changes.requests ?? {})) {
      if (Array.isArray(row)) numbers.set(id, row[0].number);
    }
    for (const [id, change] of Object.entries(changes.outputs ?? {})) {
      if (change === null) continue;
      const first = change.length === 1 ? 0 : counts.get(id); // a new list, or added to it
      counts.set(id, first + change.at(-1).length);
      const num = Math.min(result?.verified?.[id]?.[0] ?? 0, change.at(-1).length);
      const indices = found.get(numbers.get(id)) ?? new Set();
      for (let i = 0; i < num; i++) indices.add(first + i);
      if (num) found.set(numbers.get(id), indices);
    }
  }
  return found;
});

// What the step had to do with a request: positions [first, end) that it lit, and the draft tokens
// that it rejected, which stand in front of position `at`.
function stepOf({facts}, id, request) {
  const total = request.prompt.length + request.outputs.length;
  const numNew = facts?.tokens[id]?.length ?? 0;
  const ranges = (facts?.cells.get(id) ?? [])
    .filter(({kind}) => kind === "prompt" || kind === "recomputed")
    .map(({kind, start, numTokens}) => ({kind, first: start, end: start + numTokens}));
  if (numNew) ranges.push({kind: "decode", first: total - numNew, end: total});
  const verdict = facts?.result?.verified[id];
  const rejected = verdict === undefined ? [] : facts.plan.drafts[id].slice(verdict[0]);
  return {ranges, rejected, at: total - Math.min(numNew, 1)};
}

// Of a long text: its beginning, what is lit and its surroundings, its end.
function shownPositions(total, ranges, limits) {
  const shown = new Set();
  const add = (first, end) => {
    for (let i = Math.max(0, first); i < Math.min(end, total); i++) shown.add(i);
  };
  add(0, limits.head);
  add(total - limits.tail, total);
  for (const {first, end} of ranges) {
    const most = Math.min(end, first + limits.lit);
    add(first - limits.around, most + (most === end ? limits.around : 0));
  }
  return [...shown].sort((a, b) => a - b);
}

Watch.tokensOf = (view, id, limits) => {
  const request = view.request(id);
  const {ranges, rejected, at} = stepOf(view, id, request);
  const total = request.prompt.length + request.outputs.length;
  const wasDraft = acceptedIn(view.film).get(request.number);
  const parts = [];
  let next = 0;
  for (const position of shownPositions(total, ranges, limits)) {
    if (position > next) parts.push(gap(position - next));
    if (position === at) parts.push(...struckOut(view, rejected));
    parts.push(chipAt(view, request, position, ranges, wasDraft));
    next = position + 1;
  }
  if (next < total) parts.push(gap(total - next));
  if (at >= total) parts.push(...struckOut(view, rejected));
  return parts;
};

const gap = (n) => h("span", {class: "token-gap"}, `… ${t("tokens.gap", {n})} …`);

const struckOut = (view, tokens) => tokens.map((token) => h("del",
  {class: "token is-rejected", title: t("kind.rejected")}, Watch.pieceOf(view.film, token)));

function chipAt(view, request, position, ranges, wasDraft) {
  const numPrompt = request.prompt.length;
  const isDraft = wasDraft?.has(position - numPrompt) ?? false;
  const range = ranges.find(({first, end}) => position >= first && position < end);
  const classes = ["token", position < numPrompt ? "is-prompt" : "is-output"];
  if (range) classes.push("is-now", `is-${range.kind}`);
  if (isDraft) classes.push("is-accepted");
  const attributes = {class: classes.join(" "), "data-position": position};
  return h(isDraft ? "ins" : "span", attributes, Watch.pieceAt(view.film, request, position));
}

// The legend is made of the marks themselves; of draft tokens only where there are some.
function legend(film) {
  const hasDrafts = film.steps.some(({result}) => Object.keys(result?.verified ?? {}).length);
  const drafts = [
    h("ins", {class: "token is-output is-accepted"}, t("kind.accepted")),
    h("del", {class: "token is-rejected"}, t("kind.rejected")),
  ];
  return h("p", {class: "tokens-legend"},
    h("span", {class: "token is-prompt"}, t("kind.prompt")),
    h("span", {class: "token is-output"}, t("tokens.output")),
    h("span", {class: "token is-now is-decode"}, t("tokens.now")),
    ...(hasDrafts ? drafts : []));
}

Watch.drawTokens = (view) => {
  const id = Watch.store.request; // what is only pointed at may be a chip of these very rows
  return id === null ? tokensOfAll(view) : tokensOfOne(view, id);
};

function tokensOfOne(view, id) {
  const request = view.request(id);
  if (request === undefined) {
    const key = view.film.byId.has(id) ? "tokens.later" : "tokens.elsewhere";
    return [h("p", {class: "quiet"}, t(key, {request: Watch.label(id)}))];
  }
  const [prompt, outputs] = [request.prompt.length, request.outputs.length];
  const title = t("tokens.title", {request: Watch.label(id), prompt, outputs});
  const limits = {head: HEAD, tail: TAIL, around: AROUND, lit: MOST_LIT};
  const name = h("b", {}, Watch.joined(title, Watch.brings(request)));
  const tokens = Watch.tokensOf(view, id, limits);
  return [legend(view.film),
    h("p", {class: "tokens-row", "data-request": id}, name, " ", ...tokens)];
}

function tokensOfAll(view) {
  const ids = [...(view.facts?.cells.keys() ?? [])];
  const limits = {head: 0, tail: 6, around: 2, lit: 8};
  const rows = ids.slice(0, MAX_ROWS).map((id) =>
    h("p", {class: "tokens-row is-short", "data-request": id},
      Watch.requestChip(id), " ", ...Watch.tokensOf(view, id, limits)));
  const quiet = (key, values) => h("p", {class: "quiet"}, t(key, values));
  const more = ids.length > MAX_ROWS ? [quiet("tokens.more", {n: ids.length - MAX_ROWS})] : [];
  return [legend(view.film), quiet("tokens.all"), ...rows, ...more];
}
