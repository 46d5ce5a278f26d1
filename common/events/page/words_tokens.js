"use strict";
// The tokens of a request as text: prompt against output, what this step computed and brought, and
// draft tokens: underlined if they were accepted, struck out if they were rejected.
(() => {
  Watch.words({
    "tokens.title": [
      "{request}: prompt {prompt}, outputs {outputs}",
      "{request}：prompt {prompt}，输出 {outputs}",
    ],
    "tokens.later": ["{request} has not arrived yet.", "{request} 还没有到达。"],
    "tokens.elsewhere": ["{request} is not in this run.", "{request} 不在本次运行中。"],
    "tokens.all": [
      "Tokens of this step; choose a request to see all of its text.",
      "本步的 token；选定一个请求可看全文。",
    ],
    "tokens.more": ["and {n} more requests", "另有 {n} 个请求"],
    "tokens.gap": ["{n} more", "略 {n} 个"],
    "tokens.prompt": ["prompt", "prompt"],
    "tokens.output": ["output", "输出"],
    "tokens.now": ["this step", "本步"],
    "tokens.accepted": ["draft accepted", "草稿被接受"],
    "tokens.rejected": ["draft rejected", "草稿被拒绝"],
  });

  const {h, t} = Watch;
  const MAX_ROWS = 14; // requests, when none is chosen
  const [HEAD, AROUND, TAIL, MOST_LIT] = [16, 10, 40, 160]; // tokens that are shown of a long text

  // Which outputs were draft tokens: life of a request -> set of output indices, over the whole film.
  const accepted = new WeakMap();
  function acceptedIn(film) {
    if (accepted.has(film)) return accepted.get(film);
    const [byLife, lives, counts] = [new Map(), new Map(), new Map()];
    let numLives = 0;
    for (const event of film.events) {
      if (event.kind === "arrived") {
        lives.set(event.request, numLives++);
        counts.set(event.request, 0);
      }
      if (event.kind !== "computed") continue;
      for (const [id, tokens] of Object.entries(event.tokens)) {
        const [first, life] = [counts.get(id), lives.get(id)];
        counts.set(id, first + tokens.length);
        const num = Math.min(event.verified[id]?.[0] ?? 0, tokens.length);
        if (num && !byLife.has(life)) byLife.set(life, new Set());
        for (let i = 0; i < num; i++) byLife.get(life).add(first + i);
      }
    }
    accepted.set(film, byLife);
    return byLife;
  }

  // What the step had to do with a request: positions [first, end) that it lit, and the draft tokens that
  // it rejected, which stand in front of position `at`.
  function stepOf(view, id, request) {
    const {facts} = view;
    const total = request.prompt.length + request.outputs.length;
    const numNew = facts?.computed?.tokens[id]?.length ?? 0;
    const ranges = (facts?.cells.get(id) ?? [])
      .filter(({kind}) => kind === "prompt" || kind === "recomputed")
      .map(({kind, start, numTokens}) => ({kind, first: start, end: start + numTokens}));
    if (numNew) ranges.push({kind: "decode", first: total - numNew, end: total});
    const verdict = facts?.computed?.verified[id];
    const drafts = facts?.planned?.drafts[id] ?? [];
    const rejected = verdict === undefined ? [] : drafts.slice(verdict[0]);
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
    const request = view.state.requests.get(id);
    const {ranges, rejected, at} = stepOf(view, id, request);
    const total = request.prompt.length + request.outputs.length;
    const wasDraft = acceptedIn(view.film).get(request.life);
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

  const struckOut = (view, tokens) =>
    tokens.map((token) =>
      h(
        "del",
        {class: "token is-rejected", title: t("tokens.rejected")},
        Watch.pieceOf(view.film, token),
      ),
    );

  function chipAt(view, request, position, ranges, wasDraft) {
    const numPrompt = request.prompt.length;
    const isDraft = wasDraft?.has(position - numPrompt) ?? false;
    const range = ranges.find(({first, end}) => position >= first && position < end);
    const classes = ["token", position < numPrompt ? "is-prompt" : "is-output"];
    if (range) classes.push("is-now", `is-${range.kind}`);
    if (isDraft) classes.push("is-accepted");
    const chip = h(
      isDraft ? "ins" : "span",
      {class: classes.join(" "), "data-position": position},
      Watch.pieceAt(view.film, request, position),
    );
    return chip;
  }

  // The legend is made of the marks themselves; of draft tokens only where there are some.
  function legend(film) {
    const hasDrafts = film.events.some(
      ({kind, verified}) => kind === "computed" && Object.keys(verified).length,
    );
    return h(
      "p",
      {class: "tokens-legend"},
      h("span", {class: "token is-prompt"}, t("tokens.prompt")),
      h("span", {class: "token is-output"}, t("tokens.output")),
      h("span", {class: "token is-now is-decode"}, t("tokens.now")),
      ...(hasDrafts
        ? [
            h("ins", {class: "token is-output is-accepted"}, t("tokens.accepted")),
            h("del", {class: "token is-rejected"}, t("tokens.rejected")),
          ]
        : []),
    );
  }

  Watch.drawTokens = (view) => {
    const id = Watch.store.request; // what is only pointed at may be a chip of these very rows
    return id === null ? tokensOfAll(view) : tokensOfOne(view, id);
  };

  function tokensOfOne(view, id) {
    const request = view.state.requests.get(id);
    if (request === undefined) {
      const key = view.film.byId.has(id) ? "tokens.later" : "tokens.elsewhere";
      return [h("p", {class: "quiet"}, t(key, {request: Watch.label(id)}))];
    }
    const title = t("tokens.title", {
      request: Watch.label(id),
      prompt: request.prompt.length,
      outputs: request.outputs.length,
    });
    const limits = {head: HEAD, tail: TAIL, around: AROUND, lit: MOST_LIT};
    return [
      legend(view.film),
      h(
        "p",
        {class: "tokens-row", "data-request": id},
        h("b", {}, [title, Watch.brings(request)].filter(Boolean).join(" · ")),
        " ",
        ...Watch.tokensOf(view, id, limits),
      ),
    ];
  }

  function tokensOfAll(view) {
    const ids = [...(view.facts?.cells.keys() ?? [])];
    const limits = {head: 0, tail: 6, around: 2, lit: 8};
    const rows = ids
      .slice(0, MAX_ROWS)
      .map((id) =>
        h(
          "p",
          {class: "tokens-row is-short", "data-request": id},
          Watch.requestChip(id),
          " ",
          ...Watch.tokensOf(view, id, limits),
        ),
      );
    const more =
      ids.length > MAX_ROWS
        ? [h("p", {class: "quiet"}, t("tokens.more", {n: ids.length - MAX_ROWS}))]
        : [];
    return [legend(view.film), h("p", {class: "quiet"}, t("tokens.all")), ...rows, ...more];
  }
})();
