// A question before a decisive step, which is answered by pointing: at a request, or at a block.
// The step before is shown, and nothing behind it; then what happened, and whether that was it.
const {store, h, t} = Watch;
Watch.words({
  "guide.ask": ["Ask me", "考考我"],
  "guide.next": ["Next question", "下一题"],
  "guide.stop": ["Show me", "直接看"],
  "guide.right": ["Right, it is {right}. {why}", "对，是 {right}。{why}"],
  "guide.wrong": ["It is {right}, and not {given}. {why}", "是 {right}，不是 {given}。{why}"],
  "guide.block": ["block {n}", "块 {n}"],
  "guide.point.block": ["Point at a block. {ask}", "请指一个块。{ask}"],
  "guide.point.request": ["Point at a request. {ask}", "请指一个请求。{ask}"],
});
const moments = (Watch.settings.film?.moments ?? []).filter(({answer}) => answer);
let asked = null; // a moment
let verdict = null; // {moment, given}
let next = 0;

Watch.isAsking = () => asked !== null;

function ask(moment) {
  asked = moment;
  verdict = null;
  Watch.play(false);
  Watch.set({step: asked.step - 1, request: null, block: null});
  scrollTo(0, 0); // to the panel of the answer
}
const askNext = () => ask(moments[next++ % moments.length]);

function show(given) {
  verdict = {moment: asked, given};
  asked = null;
  Watch.set({request: null, block: null, ...Watch.readHash(verdict.moment.address)});
}

Watch.forgetQuestion = () => ([asked, verdict] = [null, null]);

const nameOf = ([kind, what]) => (kind === "block" ? t("guide.block", {n: what}) : what);

// What stands in the place of the caption; null: the caption itself.
Watch.guideWords = () => {
  const ask = asked && Watch.inLanguage(asked.ask);
  if (asked) return asked.isMissed ? t(`guide.point.${asked.answer[0]}`, {ask}) : ask;
  if (verdict?.given == null) return null;
  const {moment: {answer, why}, given} = verdict;
  const key = String(given) === String(answer[1]) ? "guide.right" : "guide.wrong";
  const names = {right: nameOf(answer), given: nameOf([answer[0], given])};
  return t(key, {...names, why: Watch.inLanguage(why)});
};

// The panel in which the question is answered, of those that are open.
const PANELS = {request: ["grid"], block: ["pool", "cache"]};
Watch.panelOfAnswer = (names) => {
  const [kind] = (asked ?? verdict?.moment)?.answer ?? [];
  return names.find((name) => PANELS[kind]?.includes(name));
};

const begin = h("button", {class: "ask", hidden: !moments.length, onclick: askNext,
  says: () => t(verdict ? "guide.next" : "guide.ask")});
const stop = h("button", {hidden: true, says: "guide.stop", onclick: () => show(null)});
Watch.guide = {begin, stop, draw, ask: () => moments.length && askNext()};

// Whoever points chooses a request or a block: that is the answer.
function draw() {
  if (asked) {
    const given = store[asked.answer[0]];
    if (given !== null) show(given);
    else if (store.request !== null || store.block !== null) ask({...asked, isMissed: true});
    else if (store.step !== asked.step - 1) Watch.forgetQuestion(); // the reader goes on
  }
  stop.hidden = !asked;
  begin.hidden = Boolean(asked) || !moments.length || Watch.knob.isTurned();
}
