// The picture of the grid: labels, numbers of steps, the cells that the box shows, the step shown.
// `grid` is that of grid.js and says how large a cell is and how far the box is scrolled.
const {store, t} = Watch;
Watch.words({"grid.step": ["step", "步"]});
const HEAD = 17; // pixels above the cells: numbers of steps

Watch.gridHead = HEAD;

Watch.paintGrid = (grid) => {
  const pen = Watch.sized(grid.canvas, grid.width, grid.height);
  const {columns, rows} = grid.shown();
  if (Watch.isAsking()) columns[1] = Math.min(columns[1], store.step + 1); // not the answer
  const {left, top} = grid.scroll;
  const x = (step) => grid.gutter + grid.edges[step] - left;
  const y = (row) => HEAD + row * grid.row - top;
  const chosen = grid.rows.indexOf(store.request ?? store.hover?.request);
  within(pen, [0, HEAD, grid.width, grid.height], () => {
    if (chosen >= 0) Watch.fillBox(pen, "var(--soft)", 0, y(chosen), grid.width, grid.row);
    for (let row = rows[0]; row < rows[1]; row++) {
      paintLabel(pen, grid, row, y(row), row === chosen);
    }
  });
  within(pen, [grid.gutter - 1, HEAD, grid.width, grid.height], () => {
    for (let row = rows[0]; row < rows[1]; row++) {
      for (let step = columns[0]; step < columns[1]; step++) {
        paintCell(pen, grid, row, step, [x(step), y(row), x(step + 1) - x(step)]);
      }
    }
  });
  paintHead(pen, grid, columns, x);
  paintCursor(pen, grid, x, y);
};

// Draws what `paint` draws, but nothing outside of a box.
function within(pen, box, paint) {
  pen.save();
  pen.beginPath();
  pen.rect(...box);
  pen.clip();
  paint();
  pen.restore();
}

function paintCell(pen, grid, row, step, [x, y, width]) {
  const cell = Watch.cellOf(grid.view.film, grid.rows[row], step);
  const box = [x + 1, y + 1, width - 2, grid.row - 2];
  if (cell.look === "computed") computed(pen, ...box, cell.parts);
  else if (cell.look === "waiting") waiting(pen, ...box, cell.reason);
  else if (cell.look === "idle") idle(pen, ...box);
  if (cell.marks.length) events(pen, ...box, cell.marks);
}

function paintLabel(pen, grid, row, y, isChosen) {
  const id = grid.rows[row];
  const middle = y + grid.row / 2 + 0.5;
  Watch.fillBox(pen, Watch.colour(id), 2, y + 3, 9, grid.row - 6);
  Watch.write(pen, Watch.label(id), 16, middle, isChosen ? "700 13px" : "400 13px",
    {align: "left", room: grid.tagAt - 20});
  Watch.write(pen, Watch.tagOf(id), grid.tagAt - 8, middle, "400 11px",
    {align: "left", colour: "var(--quiet)", room: grid.gutter - grid.tagAt});
}

// Where there is room for it a number; the step shown has a frame from top to bottom.
function paintHead(pen, grid, [first, end], x) {
  const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * grid.cell >= 38) ?? 200;
  const middle = (step) => (x(step) + x(step + 1)) / 2;
  Watch.write(pen, t("grid.step"), 3, HEAD - 4, "400 12px",
    {align: "left", baseline: "alphabetic"});
  let last = -Infinity;
  for (let step = Math.ceil(first / every) * every; step < end; step += every) {
    const at = middle(step);
    if (at - last < 30 || (store.step >= 0 && Math.abs(at - middle(store.step)) < 30)) continue;
    paintNumber(pen, grid, step, at, 400);
    last = at;
  }
  if (store.step < 0) return;
  paintNumber(pen, grid, store.step, middle(store.step), 700);
  if (x(store.step) < grid.gutter - 1) return;
  const below = HEAD + grid.row * grid.rows.length + 1 - grid.scroll.top;
  const wide = x(store.step + 1) - x(store.step);
  const high = Math.min(grid.height - 1, below) - HEAD + 1;
  Watch.strokeBox(pen, "var(--ink)", 2, x(store.step), HEAD - 1, wide, high);
}

function paintNumber(pen, grid, step, middle, weight) {
  if (middle < grid.gutter - 2 || middle > grid.width - 4) return;
  Watch.write(pen, step, middle, HEAD - 4, `${weight} 12px`, {baseline: "alphabetic"});
}

// Where the arrow keys are: only while the grid has the focus.
function paintCursor(pen, grid, x, y) {
  const row = grid.cursorRow();
  if (document.activeElement !== grid.box || row < 0 || store.step < 0) return;
  const [left, right] = [x(store.step) - 0.5, x(store.step + 1) + 0.5];
  Watch.strokeBox(pen, "var(--focus)", 3, left, y(row) - 0.5, right - left, grid.row + 1);
}

// -- how one cell looks: what a request computed in a step, or that it waited and why

const HATCHED = new Set(["recomputed", "rejected"]);
const LETTER_ROOM = 9; // pixels: a smaller part has its colour and pattern only

// One part above the other, each as high as its share of the tokens, a decode at the bottom.
function computed(pen, x, y, width, height, parts) {
  const total = parts.reduce((sum, {numTokens}) => sum + numTokens, 0);
  let bottom = y + height;
  let left = total;
  for (const {kind, numTokens} of parts) {
    const share = Math.max(3, Math.round(((bottom - y) * numTokens) / left));
    const top = Math.max(y, bottom - share);
    part(pen, x, top, width, bottom - top, kind, parts.length === 1 ? numTokens : 0);
    left -= numTokens;
    bottom = top;
  }
}

function part(pen, x, y, width, height, kind, numTokens) {
  const {letter, fill} = Watch.kinds[kind];
  const colour = Watch.plain(fill);
  const ink = Watch.inkOn(colour);
  Watch.fillBox(pen, colour, x, y, width, height);
  if (HATCHED.has(kind)) Watch.hatch(pen, x, y, width, height, "#00000080", 4);
  Watch.strokeBox(pen, "#00000059", 1, x + 0.5, y + 0.5, width - 1, height - 1);
  if (height < LETTER_ROOM || width < LETTER_ROOM) return;
  const digits = kind === "prompt" && numTokens > 0 ? String(numTokens) : "";
  if (digits && height >= 26 && width >= 2 + 7 * digits.length) { // the letter above them
    write(pen, letter, x + width / 2, y + height * 0.3, ink, 12);
    write(pen, digits, x + width / 2, y + height * 0.72, ink, 11);
    return;
  }
  const isCounted = digits && width >= 12 + 8 * digits.length;
  const text = isCounted ? letter + digits : letter;
  const size = height >= 26 && width >= 26 ? 14 : height >= 13 ? 12 : 10;
  if (HATCHED.has(kind)) { // a letter on lines can not be read
    Watch.fillBox(pen, colour, x + (width - size) / 2, y + (height - size) / 2, size, size);
  }
  write(pen, text, x + width / 2, y + height / 2, ink, size);
}

const write = (pen, text, x, y, colour, size) =>
  Watch.write(pen, text, x, y + 0.5, `600 ${size}px`, {colour});

// A hollow cell with the letter of its reason.
function waiting(pen, x, y, width, height, reason) {
  Watch.strokeBox(pen, "var(--mark)", 1, x + 0.5, y + 0.5, width - 1, height - 1);
  if (width < LETTER_ROOM) return;
  const letter = Watch.reasons[reason]?.letter ?? "?";
  write(pen, letter, x + width / 2, y + height / 2, "var(--quiet)", 10);
}

// It runs, and this step had nothing for it.
function idle(pen, x, y, width, height) {
  Watch.fillBox(pen, "var(--mark)", x, y + height / 2 - 1, width, 2);
}

// What happened to the request in the step: on the edge of the cell, over whatever it shows.
function events(pen, x, y, width, height, marks) {
  pen.fillStyle = Watch.plain("var(--ink)");
  for (const mark of marks) {
    if (mark === "arrived") pen.fillRect(x - 1, y, 2, height);
    else if (mark === "finished") pen.fillRect(x + width - 1, y - 1, 3, height + 2);
    else if (mark === "preempted") arrow(pen, x + width / 2, y + height, -1);
    else if (mark === "returned") arrow(pen, x + width / 2, y, 1);
  }
}

// A triangle at (x, y): its point down (out of memory, direction -1) or up (back in it, 1).
function arrow(pen, x, y, direction) {
  const [size, base] = [6, y + direction * 6];
  Watch.trace(pen, [[x, y], [x - size, base], [x + size, base]]);
  pen.closePath();
  pen.fill();
  pen.strokeStyle = Watch.plain("var(--paper)");
  pen.lineWidth = 1;
  pen.stroke();
}
