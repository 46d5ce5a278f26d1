// One box of the prefix cache: a block of a chain, or a node of a radix tree; and its line.
Watch.words({
  "cache.new": ["published", "发布"],
  "cache.split": ["split", "拆分"],
  "cache.gone": ["evicted", "淘汰"],
  "cache.hit": ["matched", "命中"],
});

const {h} = Watch;
Watch.CACHE_LANE = 42; // height of a lane, px: a number, and the text below it
const [GAP, LOW_GAP] = [10, 4]; // between two columns, for the lines
const [DIGIT, BESIDE, MARK] = [8, 48, 20]; // px: of a name; beside it, of users and of a mark
const SIGNS = {gone: "×", split: "‖", new: "+", hit: "", "": ""};

Watch.addCacheBox = (plane, id) => {
  const parts = Object.fromEntries(["name", "users", "text", "mark"]
    .map((name) => [name, h("span", {class: `cache-${name}`})]));
  const element = h("div", {class: "cache-box", role: "option", id},
    h("span", {class: "cache-top"}, parts.name, parts.users, parts.mark), parts.text);
  element.parts = parts;
  element.line = h("span", {class: "cache-line", "aria-hidden": "true"});
  plane.append(element.line, element);
  return element;
};

// `scene` has the view, the facts, the width of a column, and what is lit.
Watch.drawCacheBox = (scene, element, box) => {
  const {view, width, height, lit} = scene;
  const isLow = height < Watch.CACHE_LANE;
  const gap = isLow ? LOW_GAP : GAP;
  const {blocks, lane, column} = box;
  const {film: {cacheRefs, run}, state} = view;
  const users = box.isGone ? 0 : (state.refs[blocks[0]] ?? 0) - cacheRefs;
  const flags = {
    gone: box.isGone, match: box.matched.length, new: box.numNew, split: box.isSplit,
    used: users > 0, lit: !box.isGone && blocks.some((block) => lit.has(block)),
    windowed: Boolean(run.windows[box.group]), low: isLow,
  };
  element.box = box;
  element.dataset.blocks = blocks.join(" ");
  element.style.left = `${column * width + gap}px`;
  element.style.top = `${lane * height + (isLow ? 2 : 4)}px`;
  element.style.width = `${blocks.length * width - gap}px`;
  element.style.height = `${height - (isLow ? 4 : 6)}px`;
  const set = Object.keys(flags).filter((flag) => flags[flag]);
  element.className = ["cache-box", ...set.map((flag) => `is-${flag}`)].join(" ");
  element.ariaSelected = !box.isGone && blocks.includes(Watch.store.block) ? "true" : "false";
  const name = Watch.blockRanges(blocks);
  const room = blocks.length * width - gap - name.length * DIGIT;
  element.parts.name.textContent = name;
  const refs = users + cacheRefs;
  element.parts.users.textContent = refs > 1 && room >= BESIDE ? `×${refs}` : "";
  element.parts.mark.textContent = room >= MARK ? SIGNS[markOf(box)] : ""; // its edge says it, too
  element.parts.text.textContent = box.isGone ? "" : textOf(view, blocks);
  element.setAttribute("aria-label", nameOf(scene, box));
  drawLine(element.line, box, scene, gap);
};

const markOf = (box) => (box.isGone ? "gone" : box.isSplit ? "split" : box.numNew ? "new"
  : box.matched.length ? "hit" : "");

const textOf = ({film, state}, blocks) => blocks.flatMap((block) => state.cached[block].tokens)
  .map((token) => Watch.pieceOf(film, token)).join("");

function nameOf({view, facts}, box) {
  const what = Watch.t("pool.block", {block: Watch.blockRanges(box.blocks)});
  const mark = markOf(box);
  const about = box.isGone ? "" : Watch.describeBlock(view, facts, box.blocks[0]);
  return [what, about, mark && Watch.t(`cache.${mark}`)].filter(Boolean).join(" · ");
}

// From the parent's box to this one: straight on, or down (up) to another lane.
function drawLine(line, {lane, column, parent}, {width, height, view}, gap) {
  line.hidden = parent === null || (parent.died !== null && parent.died < view.step);
  if (line.hidden) return;
  const middle = (at) => at * height + height / 2;
  const [from, to] = [middle(parent.lane), middle(lane)];
  line.className = `cache-line ${to < from ? "is-up" : from === to ? "is-straight" : ""}`;
  line.style.left = `${column * width + (from === to ? 0 : gap / 2)}px`;
  line.style.width = `${from === to ? gap : gap / 2}px`;
  line.style.top = `${Math.min(from, to)}px`;
  line.style.height = `${Math.max(1, Math.abs(to - from))}px`;
}
