// What tests measure on the page: functions by name. `RunPage.check` in conftest.py calls them.
(() => {
return {
// Where everything stands that is there in each step: the bars, the six scenes, their parts.
places: async (stride) => {
  const places = [];
  for (let step = 0; step < Watch.numSteps(); step += stride) {
    Watch.set({step});
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const parts = [...document.querySelectorAll(
      "header > *, .transport > *, section.scene, section.scene > *, .roots > .root, .body > *")];
    places.push(parts.map((part) => {
      const {left, top, width, height} = part.getBoundingClientRect();
      const name = part.closest("section")?.dataset.scene ?? "bar";
      const words = `${name} ${part.localName}.${part.className.split(" ")[0]}`;
      return [words, left, top, width, height];
    }));
  }
  return places;
},

// What can be reached by keyboard.
controls: () => [...document.querySelectorAll(
    "a[href], button, input, select, textarea, summary, [tabindex]")]
  .filter((e) => e.tabIndex >= 0 && !e.disabled && e.checkVisibility({visibilityProperty: true}))
  .map((e, i) => {
    e.dataset.control = i;
    return `${e.localName}.${e.className} ${e.textContent.slice(0, 20)}`;
  }),

// What has the focus: its number among the controls, whether it has a ring, whether it is in sight.
focused: () => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const style = getComputedStyle(e);
  const hasRing = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1.5)
    || style.boxShadow !== "none";
  const {top, bottom, width, height} = e.getBoundingClientRect();
  const isInSight = bottom > 0 && top < innerHeight && width * height > 0;
  return [Number(e.dataset.control ?? -1), hasRing, isInSight];
},

// What the panels say, as texts: a list a panel. Blocks are "1-3 7", in the page's order.
panels: () => {
  const {films: [film], step, request} = Watch.store;
  const line = (one) => one.innerText.replaceAll(/key [^·]*· |\S+\.py:\d+/g, "")
    .replaceAll(/\s+/g, " ").trim();
  const all = (selector, read = line) => [...document.querySelectorAll(selector)].map(read);
  const ranges = (blocks) => {
    const runs = [];
    for (const block of blocks.map(Number)) {
      if (runs.at(-1)?.[1] === block - 1) runs.at(-1)[1] = block;
      else runs.push([block, block]);
    }
    return runs.map((run) => [...new Set(run)].join("-")).join(" ");
  };
  const fold = (rows, show) => {
    const found = Object.groupBy(rows, ([words]) => words);
    return Object.entries(found).map(([words, of]) => `${words}: ${show(of.map(([, one]) => one))}`);
  };
  const cells = all(".pool-cell", (cell) => {
    const texts = ["label", "refs"].map((name) => cell.querySelector(`.pool-${name}`).textContent);
    const flags = [/is-(null|free|held|idle|loading)/, /was-\w+/, /is-(published)/]
      .map((pattern) => cell.className.match(pattern)?.at(-1));
    return [[...flags, ...texts].filter(Boolean).join(" "), cell.dataset.block];
  });
  const flags = ["used", "match", "new", "split", "gone"];
  const boxes = all(".cache-box", (box) => {
    const text = box.matches(".is-new, .is-split") && box.querySelector(".cache-text").textContent;
    const is = flags.filter((flag) => box.classList.contains(`is-${flag}`));
    return [[...is, text && text.slice(0, 20)].filter(Boolean).join(" "), box.dataset.blocks];
  });
  const areNodes = boxes.some(([, blocks]) => blocks.includes(" "));
  const sentence = (group) => (item) => {
    const sources = [...item.querySelectorAll(".source-link")].map((link) => link.dataset.sentence);
    return `${group.dataset.group}: ${line(item)} ${sources}`;
  };
  const marks = {"is-prompt": "p", "is-now": "!", "is-accepted": "+", "is-rejected": "x"};
  return {
    grid: film.requests.map(({id}) => Watch.cellWords(film, id, step))
      .filter((words) => !/has (ended|not arrived)$/.test(words)),
    queue: all(".bar-sum, .bar-key, .stop, .queue-list h3, .queue-list button"),
    pool: [...all(".pool-counts, [data-order]"), ...fold(cells, ranges)],
    cache: [...all(".cache-about, .cache-match, .cache-did").filter(Boolean), ...fold(boxes, (blocks) => (areNodes
      ? blocks.map((each) => ranges(each.split(" "))).sort().join(", ")
      : ranges(blocks.sort((a, b) => a - b))))],
    words: all(".words-group", (one) => one).flatMap((group) =>
      [...(group.querySelector("ul")?.children ?? [group])].map(sentence(group))),
    // Of the chosen request: its blocks, in the order of its table, and its last tokens.
    chosen: [
      ranges(all(".pool-cell.is-lit", (cell) => [Number(cell.querySelector(".pool-label").textContent),
        cell.dataset.block]).sort(([a], [b]) => a - b).map(([, block]) => block)),
      all(".cache-box.is-lit", (box) => ranges(box.dataset.blocks.split(" "))).sort().join(", "),
      all(`.tokens-row[data-request="${request}"] .token`, (one) => one.textContent
        + Object.keys(marks).filter((name) => one.classList.contains(name)).map((name) => marks[name])
          .join("")).slice(-7).join(" "),
    ].filter(Boolean),
    // Of the block that is pointed at.
    pointed: [...new Set(all(".pool-details, .cache-details"))]
      .filter((words) => words && !words.includes("‖")), // the panel's legend
  };
},
};
})()
