// The keyboard, and over the page what its keys do: a native dialog, which keeps the focus while it
// is open. A control that has the focus keeps the keys that it needs itself.
const {store, h} = Watch;
Watch.words({
  "help.open": ["Keys", "按键"],
  "help.title": ["Keys", "按键说明"],
  "help.step": ["one step back, one step on", "后退一步、前进一步"],
  "help.ends": ["the first step, the last step", "第一步、最后一步"],
  "help.play": ["play, pause", "播放、暂停"],
  "help.moments": [
    "the last and the next event that matters: a preemption, an eviction, a cache hit",
    "上一个、下一个重要事件：抢占、淘汰、节点拆分、缓存命中"],
  "help.request": ["choose a request", "选择请求"],
  "help.rows": ["in the grid: the request above, the one below", "在网格中：上一个、下一个请求"],
  "help.escape": ["choose nothing", "取消选择"],
  "help.tab": ["the next thing that can be used", "移到下一个可操作的元素"],
  "help.this": ["this page of keys", "显示本说明"],
  "help.about": [
    "Nothing here is simulated: it is an engine's record. Drop another one here, or two to compare.",
    "本页展示的是引擎自己的记录，没有任何模拟。拖入另一个运行记录就显示它，拖入两个就并排对比。"],
});

const go = (step) => Watch.set({step});
const toggle = () => (dialog.open ? dialog.close() : dialog.showModal());
const KEYS = [ // how they are called, what is said of them, what they do
  [["←", "→"], "step",
    {ArrowLeft: () => go(store.step - 1), ArrowRight: () => go(store.step + 1)}],
  [["Home", "End"], "ends", {Home: () => go(0), End: () => go(Watch.numSteps() - 1)}],
  [["Space"], "play", {" ": () => Watch.play(!store.playing)}],
  [["[", "]"], "moments", {"[": () => Watch.nextMoment(-1), "]": () => Watch.nextMoment(1)}],
  [["/"], "request", {"/": () => Watch.frame.parts.request.focus()}],
  [["↑", "↓"], "rows", {}],
  [["Esc"], "escape", {Escape: () => Watch.set({request: null, block: null})}],
  [["Tab"], "tab", {}],
  [["?"], "this", {"?": toggle}],
];
const acts = Object.assign({}, ...KEYS.map(([, , does]) => does));

const close = h("button", {autofocus: true, says: "close", onclick: () => dialog.close()});
const dialog = h("dialog", {class: "help", "aria-labelledby": "help-title"},
  h("h2", {id: "help-title", says: "help.title"}),
  h("dl", {}, ...KEYS.flatMap(([names, key]) => [
    h("dt", {}, ...names.flatMap((name) => [h("kbd", {}, name), " "])),
    h("dd", {says: `help.${key}`}),
  ])),
  h("p", {says: "help.about"}), close);
Watch.help = {button: h("button", {says: "help.open", onclick: toggle}), dialog};

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (dialog.open && event.key !== "?") return; // it has keys of its own
  const act = acts[event.key];
  const isTyping = event.target.closest("input:not([type=range]), select, textarea");
  if (act === undefined || isTyping) return;
  if (event.key === " " && event.target.closest("button, a, summary")) return; // it presses these
  event.preventDefault();
  act();
});
