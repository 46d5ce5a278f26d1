// One setting of the engine, and the same requests with other values of it: recorded, too. The step
// is the first one that this changes.
const {store, h, t} = Watch;
Watch.words({
  "knob.name": ["Change one setting", "换个设置"],
  "knob.own": ["as told above", "原设置"],
  "knob.words": [
    "The same requests with {label}, and where to look in this run. What the film tells is at “{own}”.",
    "同样的请求，设置改为 {label}；下面是这次运行里值得看的几步。影片所讲的那次运行在“{own}”。"],
});
let [films, labels, num] = [[], [], 0]; // the film's own come first, then those of the knob
let turned = 0; // 0: the film as it is told

const choice = h("select", {class: "knob", onchange: () => turn(Number(choice.value))});
const own = h("option", {value: 0, says: "knob.own"});
const root = h("label", {class: "setting", hidden: true},
  h("span", {class: "quiet", says: "knob.name"}), choice);

function turn(value) {
  turned = value;
  Watch.forgetQuestion();
  const last = value === 0 ? num - 1 : num + value - 1;
  const difference = value ? Watch.compare.firstDifference(films[num - 1], films[last]) : null;
  const {step, request, block} = {...store, ...difference};
  const shown = [...films.slice(0, num - 1), films[last]];
  Watch.show(shown, [...labels.slice(0, num - 1), labels[last]], {step, request, block});
}

Watch.knob = {
  root,
  hold: (...given) => {
    [films, labels, num] = given;
    const names = labels.slice(num).map(([label], i) => h("option", {value: i + 1}, label));
    choice.replaceChildren(own, ...names);
    root.hidden = names.length === 0;
  },
  isTurned: () => turned > 0,
  words: () => t("knob.words", {label: labels[num + turned - 1][0], own: t("knob.own")}),
  draw: () => {
    choice.value = turned;
  },
};
