// Under the two bars, as in a chapter's film: what can be tried, what has happened, and where to
// look.
const {store, h, t} = Watch;
Watch.words({
  "invite.try": [
    "Press “{eight}”, then “{run}”. Four of the eight prompts begin alike: see which request computes that beginning, and which ones share its blocks.",
    "点“{eight}”，再点“{run}”。八条 prompt 里有四条开头相同：看哪个请求计算这个开头，哪些请求共享它的块。"],
  "invite.now": [
    "{steps} steps and {n} requests so far. Running now: {running}; waiting: {waiting}.",
    "到目前为止 {steps} 步，{n} 个请求。正在运行 {running} 个，等待 {waiting} 个。"],
  "invite.idle": [
    "{steps} steps and {n} requests so far. The engine is idle: send another prompt.",
    "到目前为止 {steps} 步，{n} 个请求。引擎空闲，可以再发 prompt。"],
});
const MOST = 5;
const text = h("p", {class: "text"});
const looks = new Watch.Looks();
const box = h("aside", {class: "film-caption", label: "caption.region"},
  text, h("p", {class: "moments-of-film"}, looks.name, looks.buttons));

function words(film) {
  const {numSteps: steps, requests: {length: n}, now} = film;
  const [running, waiting] = [now.running.length, now.waiting.length];
  const key = running + waiting ? "invite.now" : "invite.idle";
  if (steps > 0) return t(key, {steps, n, running, waiting});
  return t("invite.try", {eight: t("play.eight"), run: t("play.run")});
}

// The last of each kind: of ten evictions one is enough.
function moments(film) {
  const last = new Map();
  for (const {step, says} of Watch.momentsOf(film)) {
    for (const say of says) last.set(say[0], {step, says: [say]});
  }
  return [...last.values()].sort((a, b) => a.step - b.step).slice(-MOST).map(({step, says}) => (
    {step, words: Watch.sayMoment({says}), changes: {step, block: null}}));
}

Watch.onDraw(() => {
  const film = store.films[0];
  box.hidden = !film?.isLive;
  if (box.hidden) return;
  if (!box.isConnected) document.querySelector(".transport").after(box);
  Watch.say(text, words(film));
  looks.draw(moments(film));
});
