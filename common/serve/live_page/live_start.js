// The last of the scripts: the frame of the watch page, the playground beside it, and the engine's
// film.
const {store} = Watch;
const said = new URLSearchParams(location.search).get("lang");
if (said !== null) store.language = said;
Watch.frame.make();
document.querySelector(".transport").append(Watch.liveButton);
document.body.prepend(Watch.playground.root);
Watch.files.button.remove(); // a film that is over: `make watch`
Watch.show([], []);
let shown = null;
Watch.onDraw(() => { // a reload, and a link, keep the language
  if (shown !== null && shown !== store.language) {
    history.replaceState(null, "", `?lang=${store.language}`);
  }
  shown = store.language;
});
Watch.playground.readModels();
Watch.live();
document.documentElement.dataset.ready = "true"; // for tests
