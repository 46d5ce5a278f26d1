// How one cell of the grid looks: what a request computed in a step, or that it waited and why.
const FILLS = {
  prompt: Watch.kinds.prompt, decode: Watch.kinds.decode, recomputed: Watch.kinds.recomputed,
  draft: Watch.kinds.draft, accepted: Watch.kinds.accepted, rejected: Watch.kinds.rejected,
  discarded: Watch.kinds.waste,
};
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
  const colour = Watch.plain(FILLS[kind]);
  const ink = Watch.inkOn(colour);
  pen.fillStyle = colour;
  pen.fillRect(x, y, width, height);
  if (HATCHED.has(kind)) Watch.hatch(pen, x, y, width, height, "#00000080", 4);
  pen.strokeStyle = "#00000059";
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  if (height < LETTER_ROOM || width < LETTER_ROOM) return;
  const digits = kind === "prompt" && numTokens > 0 ? String(numTokens) : "";
  if (digits && height >= 26 && width >= 2 + 7 * digits.length) { // the letter above them
    write(pen, Watch.letters[kind], x + width / 2, y + height * 0.3, ink, 12);
    write(pen, digits, x + width / 2, y + height * 0.72, ink, 11);
    return;
  }
  const isCounted = digits && width >= 12 + 8 * digits.length;
  const text = isCounted ? Watch.letters[kind] + digits : Watch.letters[kind];
  const size = height >= 26 && width >= 26 ? 14 : height >= 13 ? 12 : 10;
  if (HATCHED.has(kind)) { // a letter on lines can not be read
    pen.fillStyle = colour;
    pen.fillRect(x + width / 2 - size / 2, y + height / 2 - size / 2, size, size);
  }
  write(pen, text, x + width / 2, y + height / 2, ink, size);
}

function write(pen, text, x, y, colour, size) {
  pen.font = `600 ${size}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillStyle = colour;
  pen.fillText(text, x, y + 0.5);
}

// A hollow cell with the letter of its reason.
function waiting(pen, x, y, width, height, reason) {
  pen.strokeStyle = Watch.plain("var(--mark)");
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  if (width < LETTER_ROOM) return;
  write(pen, Watch.reasonLetters[reason] ?? "?", x + width / 2, y + height / 2,
    Watch.plain("var(--quiet)"), 10);
}

// It runs, and this step had nothing for it.
function idle(pen, x, y, width, height) {
  pen.fillStyle = Watch.plain("var(--mark)");
  pen.fillRect(x, y + height / 2 - 1, width, 2);
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
  const size = 6;
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x - size, y + direction * size);
  pen.lineTo(x + size, y + direction * size);
  pen.closePath();
  pen.fill();
  pen.strokeStyle = Watch.plain("var(--paper)");
  pen.lineWidth = 1;
  pen.stroke();
}

Watch.gridMarks = {computed, waiting, idle, events, write};
