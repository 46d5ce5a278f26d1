"use strict";
// What a chapter's film is about, under the two bars, and the steps to look at, as buttons.
// Of a run that is no such film there is nothing to say, and no place is taken.
(() => {
  const {store, h, t} = Watch;
  Watch.words({
    "caption.region": ["What this film shows", "这部短片讲什么"],
    "caption.look": ["Look at", "请看"],
    "caption.step": ["Step {n}: {words}", "第 {n} 步：{words}"],
  });
  const about = Watch.settings.film;
  if (!about) return;

  const text = h("p", {class: "text"});
  const note = h("p", {class: "note quiet"});
  const look = h("span", {class: "quiet"});
  const buttons = about.moments.map((moment) => h("button", {onclick: () => {
    Watch.play(false);
    Watch.set({request: null, block: null, ...Watch.readHash(moment.address)});
  }}));
  const places = h("p", {class: "moments-of-film"}, look, ...buttons);
  const box = h("aside", {class: "film-caption"}, text, places, note);

  Watch.onDraw(() => {
    // Gone when another run was dropped on the page: then these are no words about it.
    const isOwn = store.films.length && (Watch.ownFilms ??= store.films) === store.films;
    box.hidden = !isOwn;
    if (!isOwn) return;
    if (!box.isConnected) document.querySelector(".transport").after(box);
    const language = store.language === "zh" ? 1 : 0;
    box.setAttribute("aria-label", t("caption.region"));
    text.textContent = about.caption[language];
    note.textContent = about.note[language];
    note.hidden = !about.note[language];
    look.textContent = t("caption.look");
    about.moments.forEach((moment, at) => {
      buttons[at].textContent = t("caption.step", {n: moment.step, words: moment.words[language]});
      buttons[at].setAttribute("aria-pressed", String(store.step === moment.step && store.request === moment.request));
    });
  });
})();
