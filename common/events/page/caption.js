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

// The steps to look at: {step, words, changes}, where `changes` of the store lead there.
Watch.Looks = class {
  name = h("span", {class: "quiet"});
  buttons = h("span", {class: "looks"});
  told = ""; // what they say: one that is pressed down is not to be replaced

  draw(moments) {
    const said = moments.map(({step, words}) => t("caption.step", {n: step, words}));
    Watch.say(this.name, said.length ? t("caption.look") : "");
    if (this.told !== (this.told = said.join())) {
      this.buttons.replaceChildren(...moments.map(({changes}, i) => h("button",
        {class: "look", onclick: () => this.go(changes)}, said[i])));
    }
    moments.forEach(({changes: {step, request = store.request}}, i) => {
      const isThere = store.step === step && store.request === request;
      this.buttons.children[i].setAttribute("aria-pressed", String(isThere));
    });
  }

  go(changes) {
    Watch.play(false);
    Watch.forgetQuestion();
    Watch.set(changes);
  }
};

// Those of the film, or with another setting those that the run itself has.
function momentsNow() {
  const go = {request: null, block: null};
  const ofFilm = ({step, words, address}) => (
    {step, words: Watch.inLanguage(words), changes: {...go, ...Watch.readHash(address)}});
  const ofRun = ({step, says}) => (
    {step, words: Watch.sayMoment({says}, 1), changes: {...go, step}});
  return Watch.knob.isTurned()
    ? Watch.momentsOf(store.films.at(-1)).slice(0, MOST).map(ofRun) : about.moments.map(ofFilm);
}

const text = h("p", {class: "text"});
const note = h("p", {class: "note quiet"});
const looks = new Watch.Looks();
const panels = h("button", {onclick: () => Watch.set({hasAllPanels: !store.hasAllPanels}),
  says: () => t(store.hasAllPanels ? "panels.few" : "panels.all")});
const {guide, knob} = Watch;
const places = h("p", {class: "moments-of-film"},
  looks.name, looks.buttons, guide.begin, guide.stop, knob.root);
const [address, ...names] = Watch.settings.link ?? [];
const link = h("a", {class: "link", href: address ?? null, hidden: !address,
  says: () => Watch.inLanguage(names) ?? ""});
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
  note.hidden = !note.textContent || Watch.guideWords() !== null;
  box.classList.toggle("asking", Watch.isAsking());
  for (const part of [looks.name, looks.buttons]) part.hidden = Watch.isAsking(); // the answer
  looks.draw(momentsNow());
});
