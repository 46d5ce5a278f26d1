// Scene 5: what changed in this step, in words, each with the lines of source that decided it; and
// below it the tokens as text.
Watch.words({
  "words.step": ["the step", "这一步"],
  "words.cache": ["the cache", "缓存"],
  "words.routine": ["one new token each", "各得一个新 token"],
  "words.nothing": ["No step to tell of.", "没有可讲的步。"],
  "words.more": ["{n} more", "还有 {n} 条"],
  "words.groups": ["{n} more requests", "还有 {n} 个请求"],
  "words.list": ["What changed in this step", "这一步发生了什么"],
  "words.tokens": ["Tokens as text", "token 文本"],
  "words.choose": ["Select request {request}", "选定请求 {request}"],
});

const {h, t} = Watch;
const MOST_GROUPS = 12;
const MOST_SENTENCES = 6; // of a group
const MOST_CHIPS = 20; // of requests that got one token

// A request by its label and its colour; pressing it chooses the request. The keyboard has the
// grid for that, and "/": one stop, and not one for each of them.
Watch.requestChip = (id) => {
  const isChosen = Watch.store.request === id;
  const chip = h("button", {
    class: "request-chip", tabindex: -1, "data-request": id, title: id,
    "aria-pressed": String(isChosen), "aria-label": t("words.choose", {request: id}),
    onclick: () => Watch.toggle(id),
    onpointerenter: () => Watch.set({hover: {request: id, block: null, film: null}}),
    onpointerleave: () => Watch.set({hover: {}}),
  }, Watch.label(id));
  chip.style.setProperty("--owner", Watch.colour(id));
  return chip;
};

// What nobody should miss goes before what happens all the time.
const RANKS = [/^say\.preempted/,
  /^say\.(returned|admitted|finished|cut|passed_over|parent|rejected)/];
const rankOf = (sentences) => {
  const rank = RANKS.findIndex((keys) => sentences.some(({key}) => keys.test(key)));
  return rank < 0 ? RANKS.length : rank;
};

// [group, its sentences]: the step first, then requests, the cache last.
Watch.groupSentences = (sentences) => {
  const groups = Map.groupBy(sentences.filter(({isRoutine}) => !isRoutine), ({group}) => group);
  const routine = sentences.filter(({isRoutine}) => isRoutine);
  // Whoever has a story already does not get its token told beside the others'.
  const alone = routine.filter(({group}) => !groups.has(group));
  for (const sentence of routine) groups.get(sentence.group)?.push(sentence);
  const cache = groups.get("cache");
  groups.delete("cache");
  const ordered = [...groups].map(([group, told]) => [group, distinct(told)])
    .sort(([a, told], [b, others]) => (a !== "") - (b !== "") || rankOf(told) - rankOf(others));
  if (cache) ordered.push(["cache", distinct(cache)]);
  return {groups: ordered, routine: alone};
};

// A policy may look up the same request twice in a step.
function distinct(sentences) {
  const seen = new Map(sentences.map((one) => [`${one.key} ${JSON.stringify(one.values)}`, one]));
  return [...seen.values()];
}

class Words {
  constructor(root, view) {
    this.view = view;
    this.unfolded = new Set(); // groups, and "all" for the list of them
    this.list = h("div", {class: "words-list", tabindex: -1, role: "group", label: "words.list"});
    this.tokens = h("div", {class: "words-tokens", role: "group", label: "words.tokens"});
    root.classList.add("words");
    root.append(this.list, this.tokens);
  }

  draw() {
    const {store} = Watch;
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
    const {shown, more} = this.folded("all", ordered, MOST_GROUPS, "words.groups");
    const parts = [...shown.map(([group, sentences]) => this.group(group, sentences)), ...more];
    if (routine.length) parts.push(this.routine(routine));
    if (!parts.length) parts.push(h("p", {class: "quiet"}, t("words.nothing")));
    this.list.replaceChildren(...parts);
    if (this.step !== this.view.step) this.list.scrollTop = 0;
    this.focusAgain(focused);
  }

  group(group, sentences) {
    const names = {"": "words.step", cache: "words.cache"};
    const name = group in names ? h("b", {}, t(names[group])) : Watch.requestChip(group);
    const {shown, more} = this.folded(group, sentences, MOST_SENTENCES, "words.more");
    const items = shown.map((sentence) => {
      const links = sentence.sources.map((source) => this.link(source)).filter(Boolean);
      return h("li", {"data-key": sentence.key}, t(sentence.key, sentence.values), " ", ...links);
    });
    items.push(...more.map((button) => h("li", {}, button)));
    return h("div", {class: "words-group", "data-group": group}, name, h("ul", {}, ...items));
  }

  link(source) {
    return Watch.sourceButton(this.view.film.run, source);
  }

  // Who got one token and has no other story: all in one line.
  routine(sentences) {
    const {shown, more} = this.folded("routine", sentences, MOST_CHIPS, "words.groups");
    const chips = [...shown.map(({group}) => Watch.requestChip(group)), ...more];
    const words = t(sentences.length === 1 ? "say.decode" : "words.routine");
    return h("div", {class: "words-group words-routine", "data-group": "routine"},
      ...chips, " ", words, " ", this.link(sentences[0].sources[0]) ?? "");
  }

  // Of a long list the first ones, and a button for the others.
  folded(group, items, most, key) {
    if (items.length <= most || this.unfolded.has(group)) return {shown: items, more: []};
    const onclick = () => {
      this.unfolded.add(group);
      Watch.redraw();
    };
    const attributes = {class: "words-unfold", "data-unfold": group, onclick};
    const more = h("button", attributes, t(key, {n: items.length - most}));
    return {shown: items.slice(0, most), more: [more]};
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
    const same = [...this.list.querySelectorAll("button")].find((one) => this.keyOf(one) === key);
    (same ?? this.list).focus({preventScroll: true});
  }
}

Watch.scene("words", ["What changed in this step", "这一步发生了什么"], Words);
