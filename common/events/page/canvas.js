// A canvas as sharp as the screen, and what is drawn on several of them. Colours may be variables
// of the styles.
// Sizes a canvas in CSS pixels and returns its cleared context.
Watch.sized = (canvas, width, height) => {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
};

Watch.fillBox = (pen, colour, x, y, width, height) => {
  pen.fillStyle = Watch.plain(colour);
  pen.fillRect(x, y, width, height);
};

Watch.strokeBox = (pen, colour, line, x, y, width, height) => {
  pen.strokeStyle = Watch.plain(colour);
  pen.lineWidth = line;
  pen.strokeRect(x, y, width, height);
};

// A line from point to point, still to be filled or drawn.
Watch.trace = (pen, [first, ...points]) => {
  pen.beginPath();
  pen.moveTo(...first);
  for (const point of points) pen.lineTo(...point);
};

// `font` is a weight and a size; a text that is wider than `room` is squeezed.
Watch.write = (pen, text, x, y, font, how = {}) => {
  const {colour = "var(--ink)", align = "center", baseline = "middle", room} = how;
  pen.font = `${font} system-ui, sans-serif`;
  [pen.textAlign, pen.textBaseline, pen.fillStyle] = [align, baseline, Watch.plain(colour)];
  pen.fillText(text, x, y, room);
};

// Lines from lower left to upper right: a mark that needs no colour.
Watch.hatch = (pen, x, y, width, height, colour, gap = 4) => {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.beginPath();
  for (let at = -height; at < width; at += gap) {
    pen.moveTo(x + at, y + height);
    pen.lineTo(x + at + height, y);
  }
  pen.strokeStyle = colour;
  pen.lineWidth = 1;
  pen.stroke();
  pen.restore();
};
