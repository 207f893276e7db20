// A panel shows one head of one model: its map, statistics and text, and small maps of all heads to choose from.

class Panel {
  constructor(index) {
    this.index = index;
    this.map = new MapView(this);
    this.inspector = new Inspector(this);
    this.select = make("select", { "aria-label": "Model", onchange: () => { activate(this.index); show(this.index, { model: this.select.selectedIndex }); } },
      ...MODELS.map(({ name }) => make("option", { textContent: name })));
    this.where = make("span", { className: "where" });
    this.note = make("span", { className: "soft note" });
    this.close = make("button", { type: "button", className: "icon", title: "Close this panel", "aria-label": "Close this panel", textContent: "×", onclick: () => unpin(this.index) });
    this.thumbs = make("div", { className: "thumbs", role: "group", "aria-label": "Layers and heads" });
    this.legend = make("div", { className: "legend" });
    this.facts = make("div", { className: "facts" });
    this.element = make("article", { className: "panel", onpointerdown: () => activate(this.index) },
      make("header", { className: "panel-head" }, this.select, this.where, this.note, this.close),
      make("div", { className: "body" },
        make("div", { className: "left" }, this.thumbs, this.facts),
        make("div", { className: "middle" }, this.map.element, this.legend),
        make("div", { className: "right" }, this.inspector.lists)),
      this.inspector.text);
    new ResizeObserver(() => this.map.draw()).observe(this.map.element);
  }

  get place() { return state.panels[this.index]; }
  get title() { const { model, layer, head } = this.place; return `${MODELS[model].name}, layer ${layer + 1}, head ${head + 1}`; }

  async draw(reveal) {
    const { place } = this, model = MODELS[place.model], head = headOf(place);
    this.select.selectedIndex = place.model;
    this.select.title = model.name;
    this.where.textContent = `Layer ${place.layer + 1} · Head ${place.head + 1}`;
    this.note.textContent = model.note;
    this.close.hidden = state.panels.length < 2;
    this.element.classList.toggle("active", state.panels.length > 1 && this.index === state.active);
    this.drawThumbs();
    this.map.draw();
    this.drawLegend();
    this.drawFacts();
    this.inspector.draw(reveal);
    if (!head.ready) {
      await head.load();
      if (this.place && head === headOf(this.place)) { this.map.draw(); this.drawLegend(); this.inspector.draw(reveal); }
    }
  }

  drawThumbs() {
    const { place } = this, { layers } = MODELS[place.model];
    if (this.shown !== place.model) {
      this.shown = place.model;
      const columns = Math.max(...layers.map(({ heads }) => heads.length));
      this.thumbs.style.setProperty("--columns", columns);
      this.buttons = layers.map(({ heads }, layer) => heads.map((_, head) =>
        make("button", { type: "button", className: "thumb", title: `Layer ${layer + 1}, head ${head + 1}`, "aria-label": `Layer ${layer + 1}, head ${head + 1}`,
          onclick: () => { activate(this.index); show(this.index, { layer, head }); } }, make("canvas", { width: 1, height: 1 }))));
      const top = make("div", { className: "row heads" }, make("span", { className: "soft" }), ...Array.from({ length: columns }, (_, h) => make("span", { className: "soft", textContent: h + 1 })));
      this.thumbs.replaceChildren(top, ...this.buttons.map((row, layer) => make("div", { className: "row" }, make("span", { className: "soft", textContent: layer + 1, title: `Layer ${layer + 1}` }), ...row)));
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

  drawLegend() {
    const { view, log, theme: tone, peak } = this.map.look(), head = headOf(this.place);
    const parts = [];
    const bars = rampsOf(head, view);
    for (const r of bars) {
      const bar = make("canvas", { width: 160, height: 1, className: "colourbar" }), context = bar.getContext("2d"), image = context.createImageData(160, 1), table = ramp(tone, r);
      for (let i = 0; i < 160; i++) { const at = 3 * Math.round((i / 159) * 255); image.data.set([table[at], table[at + 1], table[at + 2], 255], 4 * i); }
      context.putImageData(image, 0, 0);
      parts.push(make("span", { className: "scale" }, ...(r === null ? [] : [make("span", { textContent: `component ${r + 1}` })]), bar));
    }
    parts.push(make("span", { className: "soft", textContent: log ? `${number(peak / 10 ** LOG_DECADES, 2)} … ${number(peak, 2)}, logarithmic` : `0 … ${number(peak, 2)}` }));
    if (!this.map.exact && head.bin > 1) parts.push(make("span", { className: "soft pooled", textContent: `means of ${head.bin} × ${head.bin}; zoom in for single tokens` }));
    if (head.components === 1 && mostComponents > 1 && view !== "total") parts.push(make("span", { className: "soft", textContent: "this model has one component" }));
    this.legend.replaceChildren(...parts);
  }

  drawFacts() {
    const { model, layer, head: h } = this.place, facts = MODELS[model].layers[layer], head = facts.heads[h];
    const key = `${model}.${layer}.${h}.${theme()}`;
    if (this.factsOf === key) return;
    this.factsOf = key;
    const item = (name, value, title) => make("div", { className: "fact", title }, make("span", { className: "soft", textContent: name }), make("b", { textContent: value }));
    const items = [
      item("entropy", `${number(head.entropy, 3)} nats`, "Mean over the queries"),
      item("effective keys", number(Math.exp(head.entropy), 3), "exp of the entropy: how many keys a query attends to"),
      item("rank", head.rank === null ? "–" : `${head.rank} of ${head.size}`, "Number of singular values of this map above 10⁻⁶; not computed for long inputs"),
      item("effective heads", `${number(facts.effective, 3)} of ${facts.heads.length}`, "Effective number of heads of this layer: 1 if all are equal"),
    ];
    if (head.separation !== null && head.components > 1) items.push(item("component distance", `${number(head.separation, 3)} σ`, "Mean distance between two components of a key, in standard deviations"));
    this.facts.replaceChildren(make("div", { className: "factgrid" }, ...items), ...(head.components > 1 ? [componentTable(head)] : []),
      ...(facts.heads.length > 1 ? [this.similarity(facts, h)] : []));
  }

  similarity({ cosine, overlap }, h) {
    const cells = cosine.flatMap((row, a) => row.map((value, b) => {
      const cell = make("button", { type: "button", className: "cell", tabIndex: -1, title: `Heads ${a + 1} and ${b + 1}: cosine ${number(value, 3)}, overlap ${number(100 * overlap[a][b], 3)} %`,
        "aria-label": `Heads ${a + 1} and ${b + 1}: cosine ${number(value, 3)}`, onclick: () => show(this.index, { head: a === h ? b : a }) });
      const table = ramp(theme(), null), at = 3 * Math.round(255 * clamp(value, 0, 1) * 0.85);
      cell.style.background = `rgb(${table[at]},${table[at + 1]},${table[at + 2]})`;
      if (a === h || b === h) cell.classList.add("mine");
      return cell;
    }));
    const grid = make("div", { className: "similarity", role: "group", "aria-label": "Similarity of the heads of this layer" }, ...cells);
    grid.style.setProperty("--columns", cosine.length);
    return make("div", { className: "alike" }, make("h3", { textContent: "Similar heads " }, make("span", { className: "soft", textContent: "cosine of two maps" })), grid);
  }
}

function componentTable(head) {
  const percent = (x) => (x === undefined ? "–" : `${number(100 * x, 3)} %`);
  const header = ["", ...(head.prior ? ["prior"] : []), "share", "wins", "removal"];
  const titles = ["", ...(head.prior ? ["The learned prior of the component"] : []), "Share of the attention that comes from it", "Share of the pairs in which it has the largest responsibility",
    "How much the rows change (total variation) if it is removed"];
  const rows = head.share.map((share, r) => {
    const dot = make("i", { className: "dot" });
    dot.style.background = tint(r, 1);
    const cells = [...(head.prior ? [percent(head.prior[r])] : []), percent(share), percent(head.wins[r]), percent(head.removal[r])];
    return make("tr", {}, make("th", { scope: "row" }, dot, `component ${r + 1}`), ...cells.map((text) => make("td", { textContent: text })));
  });
  return make("table", { className: "components" }, make("thead", {}, make("tr", {}, ...header.map((text, i) => make("th", { scope: "col", textContent: text, title: titles[i] })))), make("tbody", {}, ...rows));
}

const THUMB = 128;

function thumbnail(canvas, head) {
  if (!head.small) { // pool once more, so that a change of view repaints few cells
    const step = Math.ceil(head.grid / THUMB), size = Math.ceil(head.grid / step);
    head.small = head.pooled.map((values) => {
      const out = new Float32Array(size * size);
      for (let i = 0; i < head.grid; i++) for (let j = 0; j < head.grid; j++) out[Math.floor(i / step) * size + Math.floor(j / step)] += values[i * head.grid + j] / (step * step);
      return out;
    });
    head.smallSize = size;
    head.smallPeak = typicalPeak(head.small, size);
  }
  const size = head.smallSize;
  canvas.width = canvas.height = size;
  canvas.style.imageRendering = size <= 48 ? "pixelated" : ""; // keep few cells sharp
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  paint(head.small, size, size, image.data, size, 0, 0, { view: state.view, log: state.log, theme: theme(), peak: head.smallPeak });
  context.putImageData(image, 0, 0);
}
