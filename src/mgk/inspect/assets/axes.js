// The axes of a map: token names or numbers, and titles.

const AXIS_TITLE = 15; // pixels

// Labels of an axis: token names if they fit, otherwise round numbers.
function axisMarks(tokens, from, to, side) {
  const cell = side / (to - from), marks = [];
  if (cell >= 10) {
    for (let i = Math.ceil(from - 0.5); i < Math.min(to, tokens.length) && i + 0.5 < to; i++)
      if (i >= 0) marks.push({ at: (i + 0.5 - from) * cell, text: tokenName(tokens, i) });
    return marks;
  }
  const rough = (to - from) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough));
  for (let i = Math.ceil(from / step) * step; i < to; i += step) marks.push({ at: (i + 0.5 - from) * cell, text: String(i), tick: true });
  return marks;
}

function drawAxes(context, tokens, [i0, i1, j0, j1], { x, y, side }, style) {
  context.fillStyle = style.getPropertyValue("--soft");
  context.strokeStyle = style.getPropertyValue("--line");
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 1;
  context.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  const space = x - 10 - AXIS_TITLE;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const { at, text } of axisMarks(tokens, i0, i1, side)) context.fillText(text, x - 6, y + at, space);
  for (const { at, text, tick } of axisMarks(tokens, j0, j1, side)) {
    context.save();
    context.translate(x + at, y - 6);
    if (tick) { context.textAlign = "center"; context.textBaseline = "bottom"; }
    else if ([...text].length < 3) { context.textAlign = "center"; context.textBaseline = "bottom"; }
    else { context.rotate(-Math.PI / 2); context.textAlign = "left"; }
    context.fillText(text, 0, 0, space);
    context.restore();
  }
}

function drawAxisTitles(context, { x, y, side }, style) {
  context.fillStyle = style.getPropertyValue("--ink");
  context.font = "600 11.5px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  context.fillText("key →", x + side / 2, 0);
  context.save();
  context.translate(AXIS_TITLE - 2, y + side / 2);
  context.rotate(Math.PI / 2); // read downwards, as the arrow points
  context.fillText("query →", 0, 0);
  context.restore();
}
