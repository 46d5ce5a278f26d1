// The frame around the scenes: two bars, six titled places, and what makes the page go.
const {store, t} = Watch;
Watch.words({
  "shell.title": ["Watch the engine run", "逐步看引擎运行"],
  "shell.play": ["Play", "播放"],
  "shell.pause": ["Pause", "暂停"],
  "shell.back": ["Step back", "后退一步"],
  "shell.on": ["Step on", "前进一步"],
  "shell.scrub": ["Step of the run", "当前步"],
  "shell.now": ["step {step} of {last}", "第 {step} 步（最后一步 {last}）"],
  "shell.no_step": ["no steps", "没有步"],
  "shell.request": ["Request", "请求"],
  "shell.all": ["all requests", "全部请求"],
  "shell.speed": ["Speed", "速度"],
  "shell.per_second": ["{n} steps a second", "每秒 {n} 步"],
  "shell.language": ["中文", "English"],
  "shell.about": [
    "num_blocks={all}: {blocks} blocks of {size} tokens and the null block; scheduler {scheduler}, policy {policy}, cache {cache}; {model}",
    "num_blocks={all}：{blocks} 个块（每块 {size} 个 token）加一个空块；调度器 {scheduler}，策略 {policy}，前缀缓存 {cache}；{model}"],
  "shell.about.live": ["{blocks} blocks of {size} tokens: room for {tokens} tokens",
    "{blocks} 个块，每块 {size} 个 token：可容纳 {tokens} 个 token"],
  "shell.mine": ["{n} of {all} functions of this engine are yours.",
    "这个引擎的 {all} 个函数里，有 {n} 个是你写的。"],
  "shell.transport": ["Steps", "步进与播放"],
});

// h("button", {class: "play"}, "text", child): an element. Text is text, never markup. What it
// says, its label and its tip may be the key of words, or a function: {says: "close"}. They are
// written again with each drawing, for as long as the frame or the scene is there.
const h = (Watch.h = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    const wordsOf = () => (typeof value === "function" ? value() : t(value));
    if (key in WRITE) writers.push(() => WRITE[key](element, wordsOf()));
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== null && value !== false) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
});

// Writes a text only where it is another: each writing costs the browser a layout.
const say = (Watch.say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
});

const writers = []; // those of the frame first
let numOfFrame = 0;
const WRITE = {
  says: say,
  label: (element, words) => element.setAttribute("aria-label", words),
  tip: (element, words) => {
    WRITE.label(element, words);
    element.title = words;
  },
};

// The size of an element as its last layout had it. Asking the element itself would make one.
Watch.sizeOf = (element) => {
  const size = {width: 0, height: 0};
  new ResizeObserver(([entry]) => {
    Object.assign(size, {width: entry.contentRect.width, height: entry.contentRect.height});
    Watch.redraw();
  }).observe(element);
  return size;
};

const OTHER = {en: "zh-CN", zh: "en"}; // the language that the button offers
const SPEEDS = [1, 2, 4, 8, 16, 32];
const parts = {};
let drawnScenes = []; // {view, panel, drawing} of what is on the page

function makeFrame() {
  const {title} = Watch.settings;
  parts.title = h("h1", {says: () => (title ? Watch.inLanguage(title) : t("shell.title"))});
  parts.about = h("p", {class: "about quiet"});
  parts.language = h("button", {says: "shell.language",
    onclick: () => Watch.set({language: store.language === "en" ? "zh" : "en"})});
  const go = (steps) => () => Watch.set({step: store.step + steps});
  parts.back = h("button", {tip: "shell.back", onclick: go(-1)}, "◀");
  parts.play = h("button", {class: "play", onclick: () => Watch.play(!store.playing)});
  parts.on = h("button", {tip: "shell.on", onclick: go(1)}, "▶");
  parts.scrub = h("input", {type: "range", min: 0, step: 1, tip: "shell.scrub",
    oninput: () => Watch.set({step: Number(parts.scrub.value)})});
  parts.now = h("output", {class: "now"});
  parts.speed = h("select", {tip: "shell.speed",
    onchange: () => Watch.set({speed: Number(parts.speed.value)})}, ...SPEEDS.map((n) =>
    h("option", {value: n, says: () => t("shell.per_second", {n})})));
  parts.request = h("select", {tip: "shell.request",
    onchange: () => Watch.set({request: parts.request.value || null})});
  parts.all = h("option", {value: "", says: "shell.all"});
  parts.scenes = h("main", {class: "scenes"});
  parts.spoken = h("p", {class: "unseen", "aria-live": "polite"});
  const {files, help, compare, momentTicks} = Watch;
  document.body.append(
    h("header", {class: "head"}, parts.title, parts.about, files.button, help.button,
      parts.language),
    h("div", {class: "transport", role: "group", label: "shell.transport"},
      parts.back, parts.play, parts.on,
      h("div", {class: "scrub"}, parts.scrub, momentTicks.frame),
      parts.now, parts.speed, parts.request),
    files.notice, compare.bar, parts.scenes, files.choose, files.curtain, help.dialog,
    parts.spoken,
  );
  numOfFrame = writers.length;
}

// New films, and where to stand in them: every scene is made anew.
Watch.show = (films, labels, changes = {}) => {
  parts.scenes.replaceChildren();
  parts.scenes.classList.toggle("comparing", films.length > 1);
  store.films = films;
  store.labels = labels;
  writers.length = numOfFrame;
  const views = films.map((film, index) => new Watch.View(film, index));
  drawnScenes = Watch.scenes.flatMap((scene) => makeScene(scene, views));
  parts.scrub.max = Math.max(0, Watch.numSteps() - 1);
  makeChoices();
  Watch.set(changes);
  Watch.play(false);
};

// The film that is shown goes on. Who looks at its last step stays at the end.
Watch.goOn = (lines) => {
  const isAtEnd = store.step >= Watch.numSteps() - 1 && !store.playing;
  const numRequests = store.films[0].requests.length;
  store.films = [store.films[0].with(lines)];
  for (const {view} of drawnScenes) view.film = store.films[0];
  parts.scrub.max = Math.max(0, Watch.numSteps() - 1);
  if (store.films[0].requests.length > numRequests) makeChoices();
  Watch.set(isAtEnd ? {step: Watch.numSteps() - 1} : {});
};

// What a film is called beside another: [in English, in Chinese if that is another word].
Watch.filmLabel = (index) => {
  const [english, chinese] = store.labels[index] ?? ["", ""];
  return Watch.inLanguage([english, chinese || english]);
};

// Gone when another run was dropped on the page: then what is said is not about it.
Watch.isOwnFilm = () => store.films.length > 0 && store.films.every((film) => film.isOfPage);

function makeScene(scene, views) {
  const title = h("h2", {id: `title-${scene.name}`, says: () => Watch.inLanguage(scene.title)});
  const roots = h("div", {class: "roots"});
  parts.scenes.append(h("section", {class: `scene scene-${scene.name}`, "data-scene": scene.name,
    "aria-labelledby": `title-${scene.name}`}, title, roots));
  return views.map((view) => {
    const body = h("div", {class: "body"});
    const of = h("p", {class: "of", hidden: views.length === 1, says: () => labelOf(view)});
    roots.append(h("div", {class: "root", "data-film": view.index}, of, body));
    return {view, panel: title.parentNode, drawing: new scene.Scene(body, view)};
  });
}

function makeChoices() {
  const options = Watch.requestIds().map((id) => h("option", {value: id}, id));
  parts.request.replaceChildren(parts.all, ...options);
}

function drawFrame() {
  if (parts.request?.firstChild == null) return; // nothing has been shown yet
  const last = Watch.numSteps() - 1;
  const now = last < 0 ? t("shell.no_step") : t("shell.now", {step: store.step, last});
  document.documentElement.lang = Watch.inLanguage(["en", "zh-CN"]);
  parts.language.lang = OTHER[store.language];
  for (const write of writers) write();
  document.title = parts.title.textContent;
  const run = store.films[0]?.run;
  say(parts.about, run ? `${mine()}${Watch.settings.is_live ? room(run) : about(run)}` : "");
  parts.about.title = run ? about(run) : "";
  say(parts.play, t(store.playing ? "shell.pause" : "shell.play"));
  say(parts.now, now);
  parts.scrub.value = Math.max(store.step, 0);
  parts.scrub.setAttribute("aria-valuetext", now);
  parts.request.value = store.request ?? "";
  parts.speed.value = store.speed;
  for (const part of [Watch.files, Watch.compare, Watch.momentTicks]) part.draw();
  Watch.arrangePanels(parts.scenes);
  for (const {panel, drawing} of drawnScenes) if (!panel.hidden) drawing.draw();
  speak(now);
}

const labelOf = ({index, film}) => (store.step >= film.numSteps && film.numSteps
  ? t("compare.over", {label: Watch.filmLabel(index), last: film.numSteps - 1})
  : Watch.filmLabel(index));

// A film that plays would talk without end.
function speak(now) {
  if (store.playing || parts.spoken.dataset.step === String(store.step)) return;
  parts.spoken.dataset.step = store.step;
  parts.spoken.textContent = [now, Watch.momentWords()].filter(Boolean).join(": ");
}

const mine = () => {
  const [n, all] = (Watch.isOwnFilm() && Watch.settings.mine) || [];
  return n === undefined ? "" : `${t("shell.mine", {n, all})} `;
};

const about = (run) => t("shell.about", {
  model: run.model.architecture ?? "?", scheduler: run.scheduler, policy: run.policy,
  cache: run.prefix_cache ?? t("list.none"), all: run.num_blocks,
  blocks: run.num_blocks - 1, size: run.block_size,
});

const room = ({num_blocks: all, block_size: size}) => {
  const [blocks, tokens] = [all - 1, (all - 1) * size].map((n) => n.toLocaleString("en"));
  return t("shell.about.live", {blocks, size, tokens});
};

// -- play

let timer = null;
Watch.play = (isPlaying) => {
  clearTimeout(timer);
  if (isPlaying && store.step >= Watch.numSteps() - 1) Watch.set({step: 0});
  Watch.set({playing: isPlaying});
  if (isPlaying) timer = setTimeout(tick, 1000 / store.speed);
};

function tick() {
  Watch.set({step: store.step + 1});
  if (store.step >= Watch.numSteps() - 1) Watch.play(false);
  else timer = setTimeout(tick, 1000 / store.speed);
}

Watch.frame = {parts, make: makeFrame};
Watch.onDraw(drawFrame);
