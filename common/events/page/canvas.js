// A canvas as sharp as the screen, and the marks that are drawn on several of them.
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
