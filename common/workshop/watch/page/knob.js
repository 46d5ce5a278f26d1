"use strict";
// One setting of the engine, and the same requests with other values of it: recorded, too. What is
// shown changes, and the step and the request that are looked at stay.
(() => {
  const {store, h, t} = Watch;
  Watch.words({
    "knob.name": ["A setting of this run", "这次运行的一项设置"],
    "knob.own": ["as told", "按原设置"],
    "knob.words": [
      "The same requests with {label}. Go back to “{own}” for what this film tells.",
      "同样的请求，设置改为 {label}。回到“{own}”，就是这部影片讲的那次运行。"],
  });
  let [films, labels, num] = [[], [], 0]; // the film's own come first, then those of the knob
  let turned = 0; // 0: the film as it is told

  const choice = h("select", {class: "knob", hidden: true,
    onchange: () => turn(Number(choice.value))});

  function turn(value) {
    turned = value;
    Watch.forgetQuestion();
    const last = value === 0 ? num - 1 : num + value - 1;
    const {step, request, block} = store;
    const shown = [...films.slice(0, num - 1), films[last]];
    Watch.show(shown, [...labels.slice(0, num - 1), labels[last]], {step, request, block});
  }

  Watch.knob = {
    choice,
    hold: (...given) => {
      [films, labels, num] = given;
      const names = labels.slice(num).map(([label], i) => h("option", {value: i + 1}, label));
      choice.replaceChildren(h("option", {value: 0}), ...names);
      choice.hidden = names.length === 0;
    },
    isTurned: () => turned > 0,
    words: () => t("knob.words", {label: labels[num + turned - 1][0], own: t("knob.own")}),
    draw: () => {
      choice.setAttribute("aria-label", t("knob.name"));
      choice.title = t("knob.name");
      Watch.say(choice.firstChild, t("knob.own"));
      choice.value = turned;
    },
  };
})();
