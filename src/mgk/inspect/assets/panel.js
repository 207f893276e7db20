// A panel shows one head of one model: its prediction, its map, the text and the numbers.

class Panel {
  constructor(index) {
    this.index = index;
    this.map = new MapView(this);
    this.text = new TextView(this);
    this.thumbs = new Thumbs(this);
    this.select = make("select", { "aria-label": "Model", onchange: () => this.choose(this.select.selectedIndex) },
      ...MODELS.map(({ name }) => make("option", { textContent: name })));
    this.note = make("span", { className: "soft note" });
    this.close = make("button", { type: "button", className: "icon", title: "Close this panel", "aria-label": "Close this panel", textContent: "×", onclick: () => unpin(this.index) });
    this.answer = make("p", { className: "answer" });
    this.where = make("h3", { className: "where" });
    this.meaning = make("p", { className: "say" });
    this.legend = make("div", { className: "legend" });
    this.facts = make("div", { className: "factgrid" });
    this.element = make("article", { className: "panel", onpointerdown: () => activate(this.index) }, ...this.sections());
    new ResizeObserver(() => this.map.draw()).observe(this.map.element);
  }

  sections() {
    const say = (textContent) => make("p", { className: "say", textContent });
    const heads = make("section", { className: "heads" }, make("h3", { textContent: "All heads" }),
      say("One small map per head: layers downwards, heads across. Choose one."), this.thumbs.element);
    const facts = make("details", { className: "facts", open: !matchMedia("(max-width: 760px)").matches },
      make("summary", {}, make("h3", { textContent: "This head in numbers" })), this.facts);
    const zoom = (label, title, by) => make("button", { type: "button", className: "icon", textContent: label, title, "aria-label": title, onclick: () => { activate(this.index); by(); } });
    return [
      make("header", { className: "panel-head" }, this.select, this.note, this.close, this.answer),
      make("div", { className: "left" }, heads, facts),
      make("section", { className: "middle" }, this.where, this.meaning, this.map.element,
        make("div", { className: "under" }, this.legend, make("div", { className: "buttons zoom" },
          zoom("+", "Zoom in (or Ctrl and wheel)", () => zoomBy(0.6)), zoom("−", "Zoom out", () => zoomBy(1 / 0.6)), zoom("⤢", "Show the whole map", () => update({ zoom: DEFAULT.zoom }))))),
      make("div", { className: "side" },
        make("section", { className: "text" }, make("h3", { textContent: "The input" }), ...this.text.elements),
        make("section", { className: "lists" }, ...this.text.lists)),
    ];
  }

  get place() { return state.panels[this.index]; }
  get title() { const { model, layer, head } = this.place; return `${MODELS[model].name}, layer ${layer + 1}, head ${head + 1}`; }

  choose(model) {
    activate(this.index);
    show(this.index, { model });
  }

  async draw(reveal) {
    const { place } = this, model = MODELS[place.model], head = headOf(place);
    this.select.selectedIndex = place.model;
    this.select.title = model.name;
    this.where.textContent = `Layer ${place.layer + 1} · Head ${place.head + 1}`;
    this.note.textContent = model.note;
    this.note.title = model.note;
    this.close.hidden = state.panels.length < 2;
    this.answer.hidden = !model.answer;
    this.answer.replaceChildren(...(model.answer ? answerLine(model.answer) : []));
    this.element.classList.toggle("active", state.panels.length > 1 && this.index === state.active);
    this.thumbs.draw();
    this.map.draw();
    this.meaning.textContent = meaningOf(head);
    this.drawLegend();
    this.drawFacts();
    this.text.draw(reveal);
    if (!head.ready) {
      await head.load();
      if (this.place && head === headOf(this.place)) { this.map.draw(); this.drawLegend(); this.text.draw(reveal); }
    }
  }

  drawLegend() {
    const { view, log, theme: tone, peak } = this.map.look(), head = headOf(this.place);
    const parts = rampsOf(head, view).map((r) => {
      const bar = sheet(160, 1, (pixels) => {
        const table = ramp(tone, r);
        for (let i = 0; i < 160; i++) { const at = 3 * Math.round((i / 159) * 255); pixels.set([table[at], table[at + 1], table[at + 2], 255], 4 * i); }
      });
      bar.className = "colourbar";
      return make("span", { className: "scale" }, ...(r === null ? [] : [`component ${r + 1}`]), bar);
    });
    const soft = (textContent, className = "") => make("span", { className: `soft ${className}`, textContent });
    parts.push(soft(log ? `${number(peak / 10 ** LOG_DECADES, 2)} … ${number(peak, 2)} or more, logarithmic` : `0 … ${number(peak, 2)} or more`));
    if (!this.map.exact && head.bin > 1) parts.push(soft(`means of ${head.bin} × ${head.bin}; zoom in for single tokens`, "pooled"));
    this.legend.replaceChildren(...parts);
  }

  drawFacts() {
    const { model, layer, head: h } = this.place, facts = MODELS[model].layers[layer], head = facts.heads[h];
    const key = `${model}.${layer}.${h}.${theme()}`;
    if (this.factsOf === key) return;
    this.factsOf = key;
    const parts = [headFacts(facts, h)];
    if (head.components > 1) parts.push(componentTable(head));
    if (facts.heads.length > 1) parts.push(similarHeads(facts, h, (head) => show(this.index, { head })));
    this.facts.replaceChildren(...parts);
  }
}

// One sentence about what the map shows in the chosen view.
function meaningOf({ components }) {
  const { view } = state;
  if (view === "total" || components === 1) {
    const alone = components === 1 && view !== "total" ? "This model has one key per token: its map is the same in every view. " : "";
    return `${alone}How much each query takes from each key; every row sums to 1.`;
  }
  if (view === "gamma") return "The hue is the component with the largest responsibility for the pair, its strength the attention weight.";
  return `The part of the attention that comes from component ${Math.min(components, Number(view.slice(1)))} of the keys; all parts sum to the attention.`;
}
