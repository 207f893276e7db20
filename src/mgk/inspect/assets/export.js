// Export the maps: `scene` lists the items to draw, `toCanvas` (PNG) and `toSvg` draw them.

const FIGURE = { map: 720, margin: 60, gap: 28, head: 54, foot: 44 };

function scene() {
  const items = [], tone = theme(), ink = tone === "dark" ? "#e8eaf0" : "#1c1d22", soft = tone === "dark" ? "#9aa2b1" : "#5c6270";
  const { map: side, margin, gap, head: top, foot } = FIGURE, column = side + margin + gap;
  panels.slice(0, state.panels.length).forEach((panel, p) => {
    const x = p * column + margin, y = top + margin, head = headOf(panel.place), look = panel.map.look(), range = panel.map.window;
    const what = head.components === 1 ? "attention" : { total: "attention", gamma: "attention, hue: component with the largest responsibility" }[state.view] ?? `contribution of component ${state.view.slice(1)}`;
    items.push({ text: panel.title, x, y: 26, size: 17, weight: 600, fill: ink }, { text: `${what}${state.log ? ", logarithmic" : ""}`, x, y: 46, size: 12, fill: soft });
    const canvas = make("canvas", { width: 2 * side, height: 2 * side });
    drawMap(canvas.getContext("2d"), head, range, look, { x: 0, y: 0, side: 2 * side }, panel.map.exact, head.pooled && basePicture(head, look));
    items.push({ image: canvas, x, y, width: side, height: side }, { frame: soft, x, y, width: side, height: side });
    const { tokens } = MODELS[panel.place.model];
    for (const { at, text } of axisMarks(tokens, range[0], range[1], side)) items.push({ text, x: x - 6, y: y + at + 4, size: 11, fill: soft, anchor: "end" });
    for (const { at, text, tick } of axisMarks(tokens, range[2], range[3], side)) {
      const upright = tick || [...text].length < 3;
      items.push({ text, x: x + at + (upright ? 0 : 4), y: y - 6, size: 11, fill: soft, anchor: upright ? "middle" : "start", turn: upright ? 0 : -90 });
    }
    items.push({ text: "query ↓   key →", x, y: y + side + 20, size: 12, fill: soft });
    items.push({ text: state.log ? `${number(look.peak / 10 ** LOG_DECADES, 2)} … ${number(look.peak, 2)}` : `0 … ${number(look.peak, 2)}`, x: x + side, y: y + side + 20, size: 12, fill: soft, anchor: "end" });
    const bars = rampsOf(head, state.view);
    bars.forEach((r, b) => {
      const bar = sheet(128, 1, (pixels) => { const table = ramp(tone, r); for (let i = 0; i < 128; i++) pixels.set([table[6 * i], table[6 * i + 1], table[6 * i + 2], 255], 4 * i); });
      items.push({ image: bar, x: x + side - 240 - 110 * b, y: y + side + 11, width: 100, height: 10 });
    });
  });
  return { items, width: state.panels.length * column, height: top + margin + side + foot, paper: rgb(PALETTE[tone].paper) };
}

const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";

function toCanvas({ items, width, height, paper }) {
  const canvas = make("canvas", { width: 2 * width, height: 2 * height }), context = canvas.getContext("2d");
  context.scale(2, 2);
  context.fillStyle = paper;
  context.fillRect(0, 0, width, height);
  for (const item of items) {
    if (item.image) { context.imageSmoothingEnabled = false; context.drawImage(item.image, item.x, item.y, item.width, item.height); continue; }
    if (item.frame) { context.strokeStyle = item.frame; context.lineWidth = 0.5; context.strokeRect(item.x, item.y, item.width, item.height); continue; }
    context.save();
    context.translate(item.x, item.y);
    context.rotate(((item.turn ?? 0) * Math.PI) / 180);
    Object.assign(context, { fillStyle: item.fill, font: `${item.weight ?? 400} ${item.size}px ${FONT}`, textAlign: { end: "right", middle: "center" }[item.anchor] ?? "left" });
    context.fillText(item.text, 0, 0);
    context.restore();
  }
  return canvas;
}

function toSvg({ items, width, height, paper }) {
  const escape = (text) => String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "�").replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const drawn = items.map((item) => {
    if (item.image) return `<image x="${item.x}" y="${item.y}" width="${item.width}" height="${item.height}" preserveAspectRatio="none" style="image-rendering:pixelated" href="${item.image.toDataURL("image/png")}"/>`;
    if (item.frame) return `<rect x="${item.x}" y="${item.y}" width="${item.width}" height="${item.height}" fill="none" stroke="${item.frame}" stroke-width="0.5"/>`;
    const turn = item.turn ? ` transform="rotate(${item.turn} ${item.x} ${item.y})"` : "";
    return `<text x="${item.x}" y="${item.y}" font-size="${item.size}" font-weight="${item.weight ?? 400}" fill="${item.fill}" text-anchor="${item.anchor ?? "start"}"${turn}>${escape(item.text)}</text>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${escape(FONT)}"><rect width="100%" height="100%" fill="${paper}"/>${drawn.join("")}</svg>`;
}

function download(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function exportAs(kind) {
  const name = state.panels.map((p) => `${MODELS[p.model].name}-layer${p.layer + 1}-head${p.head + 1}`).join("-vs-").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 80);
  if (kind === "svg") download(new Blob([toSvg(scene())], { type: "image/svg+xml" }), `${name}.svg`);
  else toCanvas(scene()).toBlob((blob) => download(blob, `${name}.png`), "image/png");
}
