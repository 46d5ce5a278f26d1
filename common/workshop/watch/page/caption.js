"use strict";
// What a chapter's film is about, under the two bars, and the steps to look at, as buttons.
// Of a run that is no such film there is nothing to say, and no place is taken.
(() => {
  const {store, h, t} = Watch;
  Watch.words({
    "caption.region": ["What this film shows", "这部影片讲什么"],
    "caption.look": ["Look at", "请看"],
    "caption.step": ["Step {n}: {words}", "第 {n} 步：{words}"],
  });
  const about = Watch.settings.film;
  if (!about) return;

  const text = h("p", {class: "text"});
  const note = h("p", {class: "note quiet"});
  const look = h("span", {class: "quiet"});
  const buttons = about.moments.map((moment) => h("button", {class: "look", onclick: () => {
    Watch.play(false);
    Watch.forgetQuestion();
    Watch.set({request: null, block: null, ...Watch.readHash(moment.address)});
  }}));
  const panels = h("button", {
    onclick: () => Watch.set({hasAllPanels: !store.hasAllPanels})});
  const places = h("p", {class: "moments-of-film"}, look, ...buttons, Watch.guide.begin, Watch.guide.stop,
    Watch.knob.choice);
  const box = h("aside", {class: "film-caption"}, text, places, note);

  Watch.onDraw(() => {
    box.hidden = !Watch.isOwnFilm();
    panels.hidden = box.hidden || !Watch.hasMorePanels;
    if (box.hidden) return;
    if (!box.isConnected) {
      document.querySelector(".transport").after(box);
      document.querySelector(".about").after(panels);
    }
    const language = store.language === "zh" ? 1 : 0;
    box.setAttribute("aria-label", t("caption.region"));
    Watch.guide.draw();
    Watch.knob.draw();
    const isTurned = Watch.knob.isTurned();
    text.textContent = isTurned ? Watch.knob.words() : Watch.guideWords() ?? about.caption[language];
    text.setAttribute("role", Watch.guideWords() === null ? "" : "status");
    note.textContent = about.note[language];
    note.hidden = !about.note[language] || Watch.isAsking();
    for (const part of [look, ...buttons]) part.hidden = isTurned || Watch.isAsking(); // they have the answer
    look.textContent = t("caption.look");
    panels.textContent = t(store.hasAllPanels ? "panels.few" : "panels.all");
    about.moments.forEach((moment, at) => {
      buttons[at].textContent = t("caption.step", {n: moment.step, words: moment.words[language]});
      buttons[at].setAttribute("aria-pressed", String(store.step === moment.step && store.request === moment.request));
    });
  });
})();
