// What the marks of the grid mean: only those that occur in its film, and in a film that goes on
// those that soon may.
const {t, h} = Watch;
Watch.words({
  "grid.waits": ["waits: {reason}", "等待：{reason}"],
  "grid.preempted": ["preempted", "被抢占"],
  "grid.returned": ["returned", "恢复"],
  "grid.finished": ["ended", "结束"],
});
const SIGNS = {preempted: "▼", returned: "▲", finished: "▐"}; // as grid_marks.js draws them

Watch.gridLegend = (film) => {
  const {kinds, reasons, marks} = occurring(film);
  const item = (name, sign, words) =>
    h("span", {}, h("i", {class: `key key-${name}`}, h("b", {}, sign)), words);
  return [
    ...kinds.map((kind) => item(kind, Watch.letters[kind], t(`kind.${kind}`))),
    ...marks.map((mark) => item("mark", SIGNS[mark], t(`grid.${mark}`))),
    ...reasons.map((reason) => item("waits", Watch.reasonLetters[reason] ?? "?",
      t("grid.waits", {reason: t(`short.${reason}`)}))),
  ];
};

const SOON = [["prompt", "decode", "recomputed"], ["blocks"], Object.keys(SIGNS)];

function occurring(film) {
  const [kinds, reasons, marks] = SOON.map((names) => new Set(film.isLive ? names : []));
  for (const facts of film.steps) {
    for (const id of facts.cells.keys()) {
      for (const {kind} of Watch.verdicts(facts, id)) kinds.add(kind);
    }
    for (const names of facts.marks.values()) for (const mark of names) marks.add(mark);
    for (const reason of film.waits(facts.number).values()) reasons.add(reason);
  }
  const inOrder = (table, found) => Object.keys(table).filter((name) => found.has(name));
  return {kinds: inOrder(Watch.letters, kinds), reasons: inOrder(Watch.reasonLetters, reasons),
    marks: inOrder(SIGNS, marks)};
}
