"use strict";
// Scene 5: what changed in this step, in words, each with the lines of source that decided it; and
// below it the tokens as text.
(() => {
  Watch.words({
    "words.comma": [", ", "，"],
    "words.step": ["the step", "这一步"],
    "words.cache": ["the cache", "缓存"],
    "words.routine": ["one new token each", "各得一个新 token"],
    "words.nothing": ["No step to tell of.", "没有可讲的步。"],
    "words.more": ["{n} more", "还有 {n} 条"],
    "words.fewer": ["show less", "收起"],
    "words.groups": ["{n} more requests", "还有 {n} 个请求"],
    "words.list": ["What changed in this step", "这一步发生了什么"],
    "words.tokens": ["Tokens as text", "token 文本"],
    "words.choose": ["Select request {request}", "选定请求 {request}"],
  });

  const {h, t} = Watch;
  const MOST_GROUPS = 12;
  const MOST_SENTENCES = 6; // of a group

  // English says "1 token", and texts with a number in them are written for several.
  const inNumber = (text) =>
    text
      .replace(
        /\b1 ((?:computed |prompt |cached |more |draft )*(?:token|output|block|node|request))s\b/g,
        "1 $1",
      );

  Watch.saySentence = ({key, values}) => inNumber(t(key, values));

  // A request by its label and its colour; pressing it chooses the request. The keyboard has the grid
  // for that, and "/": one stop, and not one for each of them.
  Watch.requestChip = (id) => {
    const isChosen = Watch.store.request === id;
    const chip = h(
      "button",
      {
        class: "request-chip",
        tabindex: -1,
        "data-request": id,
        "aria-pressed": isChosen ? "true" : "false",
        "aria-label": t("words.choose", {request: id}),
        title: id,
        onclick: () => Watch.set({request: Watch.store.request === id ? null : id}),
      },
      Watch.label(id),
    );
    chip.style.setProperty("--owner", Watch.colour(id));
    chip.addEventListener("pointerenter", () =>
      Watch.set({hover: {request: id, block: null, film: null}}),
    );
    chip.addEventListener("pointerleave", () => Watch.set({hover: {}}));
    return chip;
  };

  // What nobody should miss goes before what happens all the time.
  const RANKS = [
    /^say\.preempted/,
    /^say\.(returned|admitted|finished|cut|passed_over|parent|rejected)/,
  ];
  const rankOf = (sentences) => {
    const rank = RANKS.findIndex((keys) => sentences.some(({key}) => keys.test(key)));
    return rank < 0 ? RANKS.length : rank;
  };

  // [group, its sentences]: the step first, then requests, the cache last.
  Watch.groupSentences = (sentences) => {
    const groups = new Map([["", []]]);
    const routine = [];
    for (const sentence of sentences) {
      if (sentence.isRoutine) routine.push(sentence);
      else if (!groups.has(sentence.group)) groups.set(sentence.group, [sentence]);
      else groups.get(sentence.group).push(sentence);
    }
    // Whoever has a story already does not get its token told beside the others'.
    const alone = routine.filter(({group}) => !groups.has(group));
    for (const sentence of routine)
      if (groups.has(sentence.group)) groups.get(sentence.group).push(sentence);
    const cache = groups.get("cache");
    groups.delete("cache");
    const ordered = [...groups]
      .filter(([, told]) => told.length)
      .map(([group, told]) => [group, distinct(told)])
      .sort(([a, told], [b, others]) => (a !== "") - (b !== "") || rankOf(told) - rankOf(others));
    if (cache) ordered.push(["cache", distinct(cache)]);
    return {groups: ordered, routine: alone};
  };

  // A policy may look up the same request twice in a step.
  function distinct(sentences) {
    const seen = new Map();
    for (const sentence of sentences)
      seen.set(`${sentence.key} ${JSON.stringify(sentence.values)}`, sentence);
    return [...seen.values()];
  }

  class Words {
    constructor(root, view) {
      this.view = view;
      this.unfolded = new Set(); // groups, and "all" for the list of them
      this.list = h("div", {class: "words-list", tabindex: -1, role: "group"});
      this.tokens = h("div", {class: "words-tokens", role: "group"});
      root.classList.add("words");
      root.append(this.list, this.tokens);
    }

    draw() {
      const {store} = Watch;
      this.list.setAttribute("aria-label", t("words.list"));
      this.tokens.setAttribute("aria-label", t("words.tokens"));
      if (this.step !== this.view.step) this.unfolded.clear();
      const told = `${this.view.step} ${store.language} ${store.request} ${[...this.unfolded]}`;
      if (told !== this.told) {
        this.drawList();
        this.tokens.replaceChildren(...Watch.drawTokens(this.view));
      }
      [this.step, this.told] = [this.view.step, told];
    }

    drawList() {
      const focused = this.keyOf(document.activeElement);
      const {groups, routine} = Watch.groupSentences(Watch.sentencesOf(this.view));
      const chosen = Watch.store.request;
      const ordered = [...groups].sort(([a], [b]) => (b === chosen) - (a === chosen)); // stable else
      const isCut = ordered.length > MOST_GROUPS && !this.unfolded.has("all");
      const shown = isCut ? ordered.slice(0, MOST_GROUPS) : ordered;
      const parts = shown.map(([group, sentences]) => this.group(group, sentences));
      if (isCut)
        parts.push(this.unfolder("all", t("words.groups", {n: ordered.length - MOST_GROUPS})));
      if (routine.length) parts.push(this.routine(routine));
      if (!parts.length) parts.push(h("p", {class: "quiet"}, t("words.nothing")));
      this.list.replaceChildren(...parts);
      if (this.step !== this.view.step) this.list.scrollTop = 0;
      this.focusAgain(focused);
    }

    group(group, sentences) {
      const name =
        group === ""
          ? h("b", {}, t("words.step"))
          : group === "cache"
            ? h("b", {}, t("words.cache"))
            : Watch.requestChip(group);
      const isCut = sentences.length > MOST_SENTENCES && !this.unfolded.has(group);
      const shown = isCut ? sentences.slice(0, MOST_SENTENCES) : sentences;
      const items = shown.map((sentence) =>
        h(
          "li",
          {"data-key": sentence.key},
          Watch.saySentence(sentence),
          " ",
          ...sentence.sources
            .map((source) => Watch.sourceButton(this.view.film.run, source))
            .filter(Boolean),
        ),
      );
      if (isCut)
        items.push(
          h("li", {}, this.unfolder(group, t("words.more", {n: sentences.length - shown.length}))),
        );
      return h("div", {class: "words-group", "data-group": group}, name, h("ul", {}, ...items));
    }

    // Who got one token and has no other story: all in one line.
    routine(sentences) {
      const isCut = sentences.length > 20 && !this.unfolded.has("routine");
      const chips = sentences
        .slice(0, isCut ? 20 : undefined)
        .map(({group}) => Watch.requestChip(group));
      const more = isCut
        ? [this.unfolder("routine", t("words.groups", {n: sentences.length - 20}))]
        : [];
      const [source] = sentences[0].sources;
      return h(
        "div",
        {class: "words-group words-routine", "data-group": "routine"},
        ...chips,
        ...more,
        " ",
        t(sentences.length === 1 ? "say.decode" : "words.routine"),
        " ",
        Watch.sourceButton(this.view.film.run, source) ?? "",
      );
    }

    unfolder(group, text) {
      return h(
        "button",
        {
          class: "words-unfold",
          "data-unfold": group,
          onclick: () => {
            this.unfolded.add(group);
            Watch.redraw();
          },
        },
        text,
      );
    }

    // What is made anew gives the focus back to what has the same meaning.
    keyOf(element) {
      if (!this.list.contains(element)) return null;
      const {sentence, request, unfold} = element.dataset;
      const group = element.closest("[data-group]")?.dataset.group;
      return element === this.list ? null : [group, sentence, request, unfold].join(" ");
    }

    focusAgain(key) {
      if (key === null) return;
      const same = [...this.list.querySelectorAll("button")].find(
        (button) => this.keyOf(button) === key,
      );
      (same ?? this.list).focus({preventScroll: true});
    }
  }

  Watch.scene({
    name: "words",
    title: ["What changed in this step", "这一步发生了什么"],
    make(root, view) {
      const words = new Words(root, view);
      return {draw: () => words.draw()};
    },
  });
})();
