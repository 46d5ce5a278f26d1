// What a cell of the grid says in words: for the pointer, the keyboard and whoever listens; and the
// legend of its marks.
const {t, h} = Watch;
Watch.words({
  "cell.at": ["{request}, step {step}: {what}", "{request}，第 {step} 步：{what}"],
  "cell.part": ["{kind} {n} (position {from})", "{kind} {n} 个（位置 {from}）"],
  "cell.parts": ["{kind} {n} (positions {from} to {to})", "{kind} {n} 个（位置 {from} 到 {to}）"],
  "cell.waits": ["waits: {reason}", "等待：{reason}"],
  "cell.parent": ["waits: {parent} is computing the block that it could share",
    "等待：{parent} 正在计算它可以共享的那个块"],
  "cell.idle": ["runs, and has nothing in this step", "在运行，但这一步没有它的计算"],
  "cell.before": ["has not arrived", "还没到达"],
  "cell.elsewhere": ["is not in this run", "不在本次运行中"],
  "cell.after": ["has ended", "已经结束"],
  "cell.nothing": ["nothing", "无"],
  "cell.arrived": ["arrives", "到达"],
  "cell.admitted": ["is admitted", "准入"],
  "cell.preempted": ["is preempted", "被抢占"],
  "cell.returned": ["returns", "恢复运行"],
  "cell.finished": ["ends here", "到此结束"],
  "grid.preempted": ["preempted", "被抢占"],
  "grid.returned": ["returned", "恢复"],
  "grid.finished": ["ended", "结束"],
});

// What request `id` does in step `step`, as one of the looks of grid_paint.js.
Watch.cellOf = (film, id, step) => {
  const facts = film.steps[step];
  const marks = facts?.marks.get(id) ?? [];
  const parts = Watch.verdicts(facts, id);
  if (parts.length) return {look: "computed", parts, marks};
  const waits = film.waits(step);
  if (waits.has(id)) return {look: "waiting", reason: waits.get(id), marks, facts};
  const end = film.byId.get(id)?.lives.at(-1).end ?? null;
  // With overlap, a plan is older than the end of who has ended meanwhile.
  if (facts?.idle.includes(id) && !(end < step && end !== null)) return {look: "idle", marks};
  return {look: "empty", marks};
};

Watch.cellWords = (film, id, step) => {
  const cell = Watch.cellOf(film, id, step);
  const said = cell.marks.map((mark) => t(`cell.${mark}`));
  const main = mainWords(film, id, step, cell);
  if (cell.look !== "empty" || !said.length) said.unshift(main);
  const tag = Watch.tagOf(id);
  const request = tag ? `${id} (${tag})` : id;
  return t("cell.at", {request, step, what: said.join(t("list.and"))});
};

function mainWords(film, id, step, cell) {
  if (cell.look === "computed") return cell.parts.map(partWords).join(t("list.and"));
  if (cell.look === "waiting") {
    const parent = cell.facts.plan.parents[id];
    if (parent !== undefined) return t("cell.parent", {parent});
    return t("cell.waits", {reason: Watch.reasonWords(film.run, cell.reason)});
  }
  if (cell.look === "idle") return t("cell.idle");
  const lives = film.byId.get(id)?.lives;
  if (lives === undefined) return t("cell.elsewhere");
  if (step < lives[0].begin) return t("cell.before");
  const {end} = lives.at(-1);
  return t(end !== null && step > end ? "cell.after" : "cell.nothing");
}

const partWords = ({kind, start, numTokens}) => t(numTokens === 1 ? "cell.part" : "cell.parts",
  {kind: t(`kind.${kind}`), n: numTokens, from: start, to: start + numTokens - 1});

// -- the legend: only marks that occur in the film, and in one that goes on those that soon may

const SIGNS = {preempted: "▼", returned: "▲", finished: "▐"}; // as grid_paint.js draws them

Watch.gridLegend = (film) => {
  const {kinds, reasons, marks} = occurring(film);
  const item = (name, sign, words) =>
    h("span", {}, h("i", {class: `key key-${name}`}, h("b", {}, sign)), words);
  return [
    ...kinds.map((kind) => item(kind, Watch.kinds[kind].letter, t(`kind.${kind}`))),
    ...marks.map((mark) => item("mark", SIGNS[mark], t(`grid.${mark}`))),
    ...reasons.map((reason) => item("waits", Watch.reasons[reason]?.letter ?? "?",
      t("cell.waits", {reason: t(`short.${reason}`)}))),
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
  return {kinds: inOrder(Watch.kinds, kinds), reasons: inOrder(Watch.reasons, reasons),
    marks: inOrder(SIGNS, marks)};
}
