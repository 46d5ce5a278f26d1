// The picture of the grid: labels, numbers of steps, the cells that the box shows, the step shown.
// `grid` is that of grid.js and says how large a cell is and how far the box is scrolled.
const {store, t, gridMarks} = Watch;
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
    if (chosen >= 0) {
      pen.fillStyle = Watch.plain("var(--soft)");
      pen.fillRect(0, y(chosen), grid.width, grid.row);
    }
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
  if (cell.look === "computed") gridMarks.computed(pen, ...box, cell.parts);
  else if (cell.look === "waiting") gridMarks.waiting(pen, ...box, cell.reason);
  else if (cell.look === "idle") gridMarks.idle(pen, ...box);
  if (cell.marks.length) gridMarks.events(pen, ...box, cell.marks);
}

function paintLabel(pen, grid, row, y, isChosen) {
  const id = grid.rows[row];
  pen.fillStyle = Watch.colour(id);
  pen.fillRect(2, y + 3, 9, grid.row - 6);
  pen.fillStyle = Watch.plain("var(--ink)");
  pen.font = `${isChosen ? "700" : "400"} 13px system-ui, sans-serif`;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(Watch.label(id), 16, y + grid.row / 2 + 0.5, grid.tagAt - 20);
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = Watch.plain("var(--quiet)");
  pen.fillText(Watch.tagOf(id), grid.tagAt - 8, y + grid.row / 2 + 0.5, grid.gutter - grid.tagAt);
}

// Where there is room for it a number; the step shown has a frame from top to bottom.
function paintHead(pen, grid, [first, end], x) {
  const every = [1, 2, 5, 10, 20, 50, 100].find((n) => n * grid.cell >= 38) ?? 200;
  const middle = (step) => (x(step) + x(step + 1)) / 2;
  pen.textBaseline = "alphabetic";
  pen.textAlign = "left";
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = Watch.plain("var(--ink)");
  pen.fillText(t("grid.step"), 3, HEAD - 4);
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
  pen.strokeStyle = Watch.plain("var(--ink)");
  pen.lineWidth = 2;
  const wide = x(store.step + 1) - x(store.step);
  pen.strokeRect(x(store.step), HEAD - 1, wide, Math.min(grid.height - 1, below) - HEAD + 1);
}

function paintNumber(pen, grid, step, middle, weight) {
  if (middle < grid.gutter - 2 || middle > grid.width - 4) return;
  pen.font = `${weight} 12px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.fillStyle = Watch.plain("var(--ink)");
  pen.fillText(step, middle, HEAD - 4);
}

// Where the arrow keys are: only while the grid has the focus.
function paintCursor(pen, grid, x, y) {
  const row = grid.cursorRow();
  if (document.activeElement !== grid.box || row < 0 || store.step < 0) return;
  pen.strokeStyle = Watch.plain("var(--focus)");
  pen.lineWidth = 3;
  const wide = x(store.step + 1) - x(store.step);
  pen.strokeRect(x(store.step) - 0.5, y(row) - 0.5, wide + 1, grid.row + 1);
}
