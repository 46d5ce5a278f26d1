// The keyboard. A control that has the focus keeps the keys that it needs itself.
const {store} = Watch;
const last = () => Watch.numSteps() - 1;

const keys = {
  ArrowLeft: () => Watch.set({step: store.step - 1}),
  ArrowRight: () => Watch.set({step: store.step + 1}),
  Home: () => Watch.set({step: 0}),
  End: () => Watch.set({step: last()}),
  " ": () => Watch.play(!store.playing),
  "[": () => Watch.nextMoment(-1),
  "]": () => Watch.nextMoment(1),
  "?": () => Watch.help.toggle(),
  "/": () => Watch.frame.parts.request.focus(),
  Escape: () => Watch.set({request: null, block: null}),
};

const isTyping = (element) =>
  element.closest("input:not([type=range]), select, textarea") !== null;

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (Watch.help.dialog.open && event.key !== "?") return; // it has keys of its own
  const act = keys[event.key];
  if (act === undefined || isTyping(event.target)) return;
  if (event.key === " " && event.target.closest("button, a, summary")) return; // it presses these
  event.preventDefault();
  act();
});

Watch.keys = keys;
