// What a chapter's film is about, under the two bars, and the steps to look at, as buttons.
// Of a run that is no such film there is nothing to say, and no place is taken.
const {store, h, t} = Watch;
Watch.words({
  "caption.region": ["What this film shows", "这部影片讲什么"],
  "caption.look": ["Look at", "请看"],
  "caption.step": ["Step {n}: {words}", "第 {n} 步：{words}"],
});
const MOST = 4; // moments of a run that tells none
const about = Watch.settings.film;

const text = h("p", {class: "text"});
const note = h("p", {class: "note quiet"});
const look = h("span", {class: "quiet", says: "caption.look"});
const buttons = h("span", {class: "looks"});
let shown = null; // for which moments, in which language

// Those of the film, or with another setting those that the run itself has.
function momentsNow() {
  if (!Watch.knob.isTurned()) return about.moments;
  return Watch.momentsOf(store.films.at(-1)).slice(0, MOST).map((moment) => ({
    address: `step=${moment.step}`, step: moment.step, request: null,
    words: Array(2).fill(Watch.sayMoment(moment, 1))}));
}

function drawButtons() {
  const told = `${store.films.length} ${Watch.knob.label()} ${store.language}`;
  if (told === shown) return;
  shown = told;
  buttons.replaceChildren(...momentsNow().map((moment) => {
    const words = t("caption.step", {n: moment.step, words: Watch.inLanguage(moment.words)});
    const button = h("button", {class: "look", onclick: () => {
      Watch.play(false);
      Watch.forgetQuestion();
      Watch.set({request: null, block: null, ...Watch.readHash(moment.address)});
    }}, words);
    return Object.assign(button, {moment});
  }));
}
const panels = h("button", {
  onclick: () => Watch.set({hasAllPanels: !store.hasAllPanels})});
const {guide, knob} = Watch;
const places = h("p", {class: "moments-of-film"},
  look, buttons, guide.begin, guide.stop, knob.root);
const [address, ...names] = Watch.settings.link ?? [];
const link = h("a", {class: "link", href: address ?? null, hidden: !address});
const box = h("aside", {class: "film-caption", label: "caption.region"}, text, places, note);

Watch.onDraw(() => {
  box.hidden = !about || !Watch.isOwnFilm();
  panels.hidden = box.hidden || !Watch.hasMorePanels;
  if (box.hidden) return;
  if (!box.isConnected) {
    document.querySelector(".transport").after(box);
    document.querySelector(".about").after(link, panels);
  }
  guide.draw();
  knob.draw();
  const isTurned = knob.isTurned();
  text.textContent = isTurned ? knob.words()
    : Watch.guideWords() ?? Watch.inLanguage(about.caption);
  text.setAttribute("role", Watch.guideWords() === null ? "" : "status");
  note.textContent = Watch.inLanguage(about.note);
  note.hidden = !note.textContent || Watch.isAsking();
  for (const part of [look, buttons]) part.hidden = Watch.isAsking(); // they have the answer
  drawButtons();
  link.textContent = Watch.inLanguage(names) ?? "";
  panels.textContent = t(store.hasAllPanels ? "panels.few" : "panels.all");
  for (const button of buttons.children) {
    const {step, request} = button.moment;
    button.setAttribute("aria-pressed", String(store.step === step && store.request === request));
  }
});
