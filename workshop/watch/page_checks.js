// What tests measure on the page: functions by name. `RunPage.check` in conftest.py calls them.
(() => {
// Each text that is not hidden, and the element in which it stands.
const texts = (hidden) => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const [words, owner] = [node.textContent.trim(), node.parentElement];
    if (!words || owner.closest(`script, style, noscript, .unseen, dialog:not([open]), ${hidden}`))
      continue;
    const isSeen = owner.checkVisibility({checkOpacity: true, checkVisibilityCSS: true});
    if (isSeen) found.push({node, words, owner});
  }
  return found;
};

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

// Texts whose letters are outside of a box that cuts them off (a box that scrolls does not; one with
// an ellipsis has to say the whole in its title or its name), and pairs that stand on each other.
labels: () => {
  const SLACK = 1.5;
  const faults = [];
  const shown = [];
  // Whether one stands in the other, or on a ground of its own, so that no letters mix.
  const covers = (one, other) => {
    for (let at = one; at; at = at.parentElement) {
      if (at.contains(other)) return at === one;
      if (!/^(transparent|rgba\(.*, 0\))$/.test(getComputedStyle(at).backgroundColor)) return true;
    }
    return false;
  };
  for (const {node, words, owner} of texts("option")) {
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      if (rect.width < 1 || rect.height < 1) continue;
      let {left, top, right, bottom} = rect;
      for (let box = owner; box && box !== document.body; box = box.parentElement) {
        const style = getComputedStyle(box);
        if (style.position === "fixed") break;
        const frame = box.getBoundingClientRect();
        const cuts = [["x", style.overflowX, left, right, frame.left, frame.right],
          ["y", style.overflowY, top, bottom, frame.top, frame.bottom]];
        for (const [axis, overflow, from, to, first, last] of cuts) {
          if (overflow === "visible" || (from >= first - SLACK && to <= last + SLACK)) continue;
          if (from > last - SLACK || to < first + SLACK) continue; // not shown at all
          const says = style.textOverflow === "ellipsis" && axis === "x"
            && box.closest("[title], [aria-label]");
          if (!["auto", "scroll"].includes(overflow) && !says) {
            faults.push(`cut: ${words.slice(0, 40)} (${axis}, in .${box.className})`);
          }
        }
        if (style.overflowX !== "visible") {
          [left, right] = [Math.max(left, frame.left), Math.min(right, frame.right)];
        }
        if (style.overflowY !== "visible") {
          [top, bottom] = [Math.max(top, frame.top), Math.min(bottom, frame.bottom)];
        }
      }
      const isSeen = right - left > 1 && bottom - top > 1;
      if (isSeen) shown.push({owner, words, left, top, right, bottom});
    }
  }
  shown.forEach((a, i) => {
    for (const b of shown.slice(i + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const line = Math.min(a.bottom - a.top, b.bottom - b.top);
      const isMixed = !covers(a.owner, b.owner) && !covers(b.owner, a.owner);
      if (wide > 2 && high > 0.4 * line && isMixed) {
        faults.push(`on each other: ${a.words.slice(0, 30)} and ${b.words.slice(0, 30)}`);
      }
    }
  });
  return [shown.length, [...new Set(faults)]];
},

// The contrast of each text with what it stands on: [ratio, words, class, colour, ground].
contrasts: () => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const read = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = "#000";
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) =>
    [...[0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])), 1];
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  const COLOUR = /(?:rgba?|color|oklab|oklch|lab|hsl)\([^()]*\)|#[0-9a-f]{3,8}/gi;
  // All grounds that an element may stand on: a gradient has several.
  const grounds = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      const stops = style.backgroundImage.match(COLOUR)?.map(read);
      const plain = read(style.backgroundColor);
      layers.push(stops ? [plain, ...stops] : [plain]);
      if (plain[3] === 1) break;
    }
    let found = [[255, 255, 255, 1]];
    for (const layer of layers.reverse()) {
      const [plain, ...stops] = layer;
      found = found.flatMap((below) => {
        const base = over(plain, below);
        return stops.length ? stops.map((stop) => over(stop, base)) : [base];
      });
    }
    return found;
  };
  const results = [];
  for (const {words, owner} of texts("[aria-hidden=true]")) {
    let alpha = 1;
    for (let at = owner; at; at = at.parentElement) alpha *= Number(getComputedStyle(at).opacity);
    const colour = read(getComputedStyle(owner).color);
    colour[3] *= alpha;
    for (const ground of grounds(owner)) {
      const seen = over(colour, ground);
      const colours = [seen, ground].map((colour) => String(colour.map(Math.round)));
      results.push([ratio(seen, ground), words.slice(0, 30), owner.className, ...colours]);
    }
  }
  return results;
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
