// Small maps of all heads of a model, to choose one.

const THUMB = 128;

class Thumbs {
  constructor(panel) {
    this.panel = panel;
    this.element = make("div", { className: "thumbs", role: "group", "aria-label": "Layers and heads" });
  }

  // One button per head; made once per model.
  make(model) {
    const { layers } = MODELS[model], columns = Math.max(...layers.map(({ heads }) => heads.length));
    this.element.style.setProperty("--columns", columns);
    this.buttons = layers.map(({ heads }, layer) => heads.map((_, head) => this.button(layer, head)));
    const soft = (textContent, title = "") => make("span", { className: "soft", textContent, title });
    const top = make("div", { className: "row" }, soft("", ""), ...Array.from({ length: columns }, (_, h) => soft(h + 1, `Head ${h + 1}`)));
    const rows = this.buttons.map((row, layer) => make("div", { className: "row" }, soft(layer + 1, `Layer ${layer + 1}`), ...row));
    this.element.replaceChildren(top, ...rows);
  }

  button(layer, head) {
    const name = `Layer ${layer + 1}, head ${head + 1}`;
    const choose = () => { activate(this.panel.index); show(this.panel.index, { layer, head }); };
    return make("button", { type: "button", className: "thumb", title: name, "aria-label": name, onclick: choose }, make("canvas", { width: 1, height: 1 }));
  }

  draw() {
    const { place } = this.panel, { layers } = MODELS[place.model];
    if (this.shown !== place.model) {
      this.shown = place.model;
      this.make(place.model);
    }
    const look = `${place.model} ${state.view} ${state.log} ${theme()}`;
    this.buttons.forEach((row, l) => row.forEach((button, h) => {
      button.setAttribute("aria-pressed", String(l === place.layer && h === place.head));
      if (button.drawn === look) return;
      const head = layers[l].heads[h];
      const draw = () => { thumbnail(button.firstChild, head); button.drawn = look; };
      if (head.pooled) draw();
      else track(head.loadBase().then(() => { if (this.shown === head.model) draw(); }));
    }));
  }
}

function thumbnail(canvas, head) {
  if (!head.small) shrink(head);
  const size = head.smallSize;
  canvas.width = canvas.height = size;
  canvas.style.imageRendering = size <= 48 ? "pixelated" : ""; // keep few cells sharp
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  paint(head.small, size, size, image.data, size, 0, 0, { view: state.view, log: state.log, theme: theme(), peak: head.smallPeak });
  context.putImageData(image, 0, 0);
}

// Pool a map once more, so that a change of view repaints few cells.
function shrink(head) {
  const { grid } = head, step = Math.ceil(grid / THUMB), size = Math.ceil(grid / step);
  head.small = head.pooled.map((values) => {
    const out = new Float32Array(size * size);
    for (let i = 0; i < grid; i++)
      for (let j = 0; j < grid; j++) out[Math.floor(i / step) * size + Math.floor(j / step)] += values[i * grid + j] / (step * step);
    return out;
  });
  head.smallSize = size;
  head.smallPeak = typicalPeak(head.small, size);
}
