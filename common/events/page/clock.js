// Scene 6: where the time of a step went. Above, this step to scale; below, all steps.
//
// Where steps overlap, two are under way at a time: the second lane is the next step, which is
// planned and begun while this one computes.
const {store, t, h} = Watch;
Watch.words({
  "clock.schedule": ["schedule", "调度"],
  "clock.prepare": ["prepare", "准备"],
  "clock.forward": ["forward", "前向"],
  "clock.sample": ["sample", "采样"],
  "clock.propose": ["propose", "提议"],
  "clock.update": ["update", "更新"],
  "clock.under_way": ["in flight", "进行中"],
  "clock.ms": ["{ms} ms", "{ms} 毫秒"],
  "clock.step": ["step {n}", "第 {n} 步"],
  "clock.bar": ["Step {n}, {ms} ms: {parts}", "第 {n} 步，{ms} 毫秒：{parts}"],
  "clock.failed": ["The step failed: {error}", "这一步失败：{error}"],
  "clock.strip": ["Time of each step, cut off at {ms} ms. Click to go there.",
    "每一步的时间，纵轴到 {ms} 毫秒为止。点击可跳转。"],
  "clock.caption": [
    "Step {n} took {ms} ms, {ratio} times the median step ({middle} ms). Below: all steps, cut off at {top} ms",
    "第 {n} 步用了 {ms} 毫秒，是步时中位数（{middle} 毫秒）的 {ratio} 倍。下方：所有步，纵轴到 {top} 毫秒为止，更高的截平"],
});
// Shares of ink: neighbours differ, and the palest is still 3 : 1 on the paper.
const SHADES = {
  schedule: 0.95, prepare: 0.7, forward: 0.48, sample: 0.8, propose: 0.6, update: 0.95,
};
const PARTS = Object.keys(SHADES);
const shadeOf = (part) => {
  const ink = SHADES[part] * (255 - 34);
  const level = Math.round(Watch.isDark.matches ? 34 + ink : 255 - ink);
  return `#${level.toString(16).padStart(2, "0").repeat(3)}`;
};

const round = (ms) => (ms >= 100 ? ms.toFixed(0) : ms >= 10 ? ms.toFixed(1) : ms.toFixed(2));

// Of one step: {part: ms}. What the step has not is 0.
const timesOf = (facts) => {
  const {times, update_ms} = facts?.result ?? {};
  const ms = {...times, update_ms, schedule_ms: facts?.plan?.schedule_ms};
  return Object.fromEntries(PARTS.map((part) => [part, ms[`${part}_ms`] ?? 0]));
};
const endOf = ({time, update_ms: ms = 0}) => time + ms / 1e3;
const total = (times) => PARTS.reduce((sum, part) => sum + times[part], 0);

// Of each step of a film, how long its parts and all of it took; and of the one in the middle.
const partsOf = Watch.ofFilm((film) => film.steps.map(timesOf));
Watch.stepTimes = Watch.ofFilm((film) => partsOf(film).map(total));
Watch.middleOf = (film) =>
  Watch.stepTimes(film).toSorted((a, b) => a - b)[film.numSteps >> 1] ?? 0;

class Clock {
  constructor(root, view) {
    this.view = view;
    this.parts = h("ul", {class: "clock-parts"});
    this.lanes = h("div", {class: "lanes", role: "img"});
    this.strip = h("canvas", {class: "strip", role: "img"});
    this.strip.addEventListener("click", (event) => {
      const share = event.offsetX / this.strip.clientWidth;
      Watch.set({step: Math.floor(share * Watch.numSteps())});
    });
    root.classList.add("clock-body");
    this.caption = h("p", {class: "clock-caption"});
    root.append(this.caption, this.parts, this.lanes,
      h("div", {class: "strip-frame"}, this.strip));
    this.painted = h("canvas"); // all steps, before one is marked
    this.size = Watch.sizeOf(this.strip.parentNode); // as wide as the bar
  }

  draw() {
    const {facts, film} = this.view;
    const times = timesOf(facts);
    const there = PARTS.filter((part) => partsOf(film).some((times) => times[part] > 0));
    this.parts.replaceChildren(...there.map((part) => h("li", {},
      h("i", {class: "key", style: `background: ${shadeOf(part)}`}),
      h("span", {}, t(`clock.${part}`)), h("b", {}, t("clock.ms", {ms: round(times[part])})))));
    const said = PARTS.map((part) => `${t(`clock.${part}`)} ${round(times[part])}`).join(", ");
    this.lanes.setAttribute("aria-label", t("clock.bar",
      {n: facts?.number ?? 0, ms: round(total(times)), parts: said}));
    if (facts && facts.error !== null) this.drawFailed(facts);
    else if (film.run.overlaps) this.drawLanes(facts);
    else this.drawBar(times);
    this.drawStrip();
  }

  drawFailed(facts) {
    const words = t("clock.failed", {error: facts.error});
    this.lanes.setAttribute("aria-label", words);
    this.lanes.replaceChildren(h("p", {class: "failed", title: words}, words));
  }

  // One after the other: a bar whose parts are as long as they took.
  drawBar(times) {
    const whole = total(times);
    const {width} = this.size;
    const boxes = PARTS.filter((part) => times[part] > 0).map((part) => {
      const room = (width * times[part]) / whole;
      return box(`flex: ${times[part]} 1 0; ${look(part)}`, room > 66 ? t(`clock.${part}`) : "");
    });
    this.lanes.replaceChildren(h("div", {class: "lane"}, ...boxes));
  }

  // By the clock: from the moment at which the plan of this step began to the end of its update.
  drawLanes(facts) {
    const [start, end] = [facts?.plan?.time ?? 0, facts?.result ? endOf(facts.result) : 1];
    const lanes = [this.lane(facts?.plan, facts, start, end)];
    for (const plan of facts?.plans ?? []) {
      if (plan.step !== facts.plan?.step) lanes.push(this.lane(plan, null, start, end));
    }
    this.lanes.replaceChildren(...lanes);
  }

  lane(plan, facts, start, end) {
    const lane = h("div", {class: "lane by-clock"});
    if (!plan) return lane;
    const place = (from, to) => {
      const share = (time) => (100 * (Math.min(time, end) - start)) / (end - start);
      return `left: ${share(from)}%; width: ${Math.max(0.2, share(to) - share(from))}%;`;
    };
    const planEnd = plan.time + (plan.schedule_ms ?? 0) / 1e3;
    const until = facts?.result?.time ?? end;
    const name = `${t("clock.step", {n: plan.step})}: ${t("clock.under_way")}`;
    lane.append(box(place(plan.time, planEnd) + look("schedule"), ""),
      box(place(planEnd, until) + look("forward"), name));
    if (facts?.result) lane.append(box(place(until, end) + look("update"), ""));
    return lane;
  }

  // All steps as columns of one height for the slowest twentieth: one slow step hides no others.
  drawStrip() {
    const {width, height} = this.size;
    if (width < 1 || height < 1) return; // not laid out yet
    const top = topOf(store.films);
    const told = `${width} ${top} ${this.view.film.numSteps}`; // a film may go on
    if (this.told !== told) this.paintStrip(width, height, top);
    this.told = told;
    const pen = Watch.sized(this.strip, width, height);
    pen.drawImage(this.painted, 0, 0, width, height);
    const column = width / Math.max(1, Watch.numSteps());
    const box = [store.step * column, 1, Math.max(column, 3), height - 2];
    if (store.step >= 0) Watch.strokeBox(pen, "var(--ink)", 2, ...box);
    const words = t("clock.strip", {ms: round(top)});
    if (this.strip.title !== words) {
      this.strip.setAttribute("aria-label", words);
      this.strip.title = words;
    }
    const {film, step} = this.view;
    const [ms, middle] = [Watch.stepTimes(film)[step] ?? 0, Watch.middleOf(film)];
    const ratio = (ms / (middle || 1)).toFixed(1);
    Watch.say(this.caption, step < 0 ? "" : t("clock.caption",
      {n: step, ms: round(ms), ratio, middle: round(middle), top: round(top)}));
  }

  paintStrip(width, height, top) {
    const pen = Watch.sized(this.painted, width, height);
    const column = width / Math.max(1, Watch.numSteps());
    partsOf(this.view.film).forEach((times, step) => {
      let bottom = height;
      for (const part of PARTS) {
        const tall = (times[part] / top) * (height - 2);
        const wide = column > 4 ? column - 1 : Math.max(1, column);
        Watch.fillBox(pen, shadeOf(part), step * column, bottom - tall, wide, tall);
        bottom -= tall;
      }
    });
  }
}

const box = (style, text) => h("span", {style}, text);
const look = (part) => `background: ${shadeOf(part)}; color: ${Watch.inkOn(shadeOf(part))};`;

// The height of the strip: 95 of 100 steps are shorter, in both films of a comparison.
const topOf = Watch.ofFilm((films) => {
  const all = films.flatMap(Watch.stepTimes).sort((a, b) => a - b);
  return (all[Math.floor(all.length * 0.95)] ?? 1) * 1.15 || 1;
});

Watch.scene("clock", ["The clock", "耗时"], Clock);
