// The chosen token: the keys it attends to and the queries that attend to it, as lists and as colours in the text.

const LISTED = 8;
const CHUNK = 250;
const SHADES = 10;

class TextView {
  constructor(panel) {
    this.panel = panel;
    this.search = make("input", { type: "search", placeholder: "Find a token", "aria-label": "Find a token", autocomplete: "off", spellcheck: false,
      oninput: () => this.find(0), onkeydown: (event) => this.key(event) });
    this.hits = make("span", { className: "soft hits" });
    this.which = make("div", { className: "segments small", role: "group", "aria-label": "What the colours of the text show" },
      ...[["out", "what it reads"], ["in", "what reads it"]].map(([from, label]) =>
        make("button", { type: "button", textContent: label, "data-from": from, onclick: () => update({ from }) })));
    this.say = make("p", { className: "say" });
    this.strip = make("div", { className: "strip", tabIndex: 0, "aria-label": "The text" });
    this.out = make("ol", { className: "list" });
    this.in = make("ol", { className: "list" });
    this.outTitle = make("h3");
    this.inTitle = make("h3");
    this.lists = [make("div", {}, this.outTitle, this.out), make("div", {}, this.inTitle, this.in)];
    this.elements = [this.say, this.strip, make("div", { className: "textbar" }, this.search, this.hits, this.which)];
    this.listen();
  }

  listen() {
    this.strip.addEventListener("pointermove", (event) => {
      const i = event.target.dataset?.i;
      if (i !== undefined && event.pointerType === "mouse") hover(state.from === "in" ? { j: +i } : { i: +i }, this.panel);
    });
    this.strip.addEventListener("pointerleave", () => hover(null));
    this.strip.addEventListener("scroll", () => this.colourVisible(), { passive: true });
    this.strip.addEventListener("click", (event) => {
      const i = event.target.dataset?.i;
      if (i !== undefined) { activate(this.panel.index); update({ token: state.token === +i ? null : +i }); }
    });
  }

  key(event) {
    if (event.key !== "Enter") return;
    event.preventDefault();
    this.find(event.shiftKey ? -1 : 1);
  }

  get tokens() { return MODELS[this.panel.place.model].tokens; }

  // Write the text of a model: one span per token, in chunks, of which only the visible ones are coloured.
  write() {
    const { model } = this.panel.place;
    if (this.model === model) return;
    this.model = model;
    this.spans = [];
    this.chunks = [];
    for (let start = 0; start < this.tokens.length; start += CHUNK) {
      const chunk = make("span");
      for (let i = start; i < Math.min(start + CHUNK, this.tokens.length); i++) {
        const span = document.createElement("span");
        span.textContent = this.tokens[i].replace(/\n/g, "↵\n");
        span.dataset.i = i;
        this.spans.push(span);
        chunk.append(span);
      }
      this.chunks.push(chunk);
    }
    const { unseen, longestToken } = MODELS[model];
    for (const list of this.lists) list.style.setProperty("--token", `${clamp(0.75 * longestToken, 2.2, 8)}em`);
    this.strip.replaceChildren(...this.chunks, ...(unseen ? [make("span", { className: "unseen", title: "The model did not read this part", textContent: unseen })] : []));
  }

  // step 0 (while typing): keep the token if it still matches; 1 and -1: next and previous match.
  find(step) {
    const wanted = this.search.value, { tokens } = this, low = wanted.toLowerCase();
    if (!wanted) { this.hits.textContent = ""; return; }
    const matches = (i) => tokens[i].toLowerCase().includes(low);
    const index = /^#?\d+$/.test(wanted) ? Number(wanted.replace("#", "")) : null;
    const all = [];
    for (let i = 0; i < tokens.length; i++) if (matches(i)) all.push(i);
    if (!all.length && wanted.length > 1) { // search across token boundaries
      const starts = [];
      let text = "";
      for (const token of tokens) { starts.push(text.length); text += token.toLowerCase(); }
      for (let at = text.indexOf(low), i = 0; at >= 0; at = text.indexOf(low, at + 1)) {
        while (i + 1 < starts.length && starts[i + 1] <= at) i++;
        all.push(i);
      }
    }
    if (!all.length && index !== null && index < tokens.length) all.push(index);
    if (!all.length) { this.hits.textContent = "none"; return; }
    const now = state.token ?? -1, here = all.indexOf(now);
    const next = here >= 0 ? (here + step + all.length) % all.length : Math.max(0, all.findIndex((i) => i > now));
    this.hits.textContent = `${next + 1} of ${all.length}`;
    update({ token: all[next] }, { reveal: true });
  }

  draw(reveal) {
    this.write();
    const head = headOf(this.panel.place), { tokens } = this;
    const pointed = hovered && (state.from === "in" ? hovered.j ?? hovered.i : hovered.i ?? hovered.j);
    const token = pointed ?? state.token;
    if (reveal && state.token !== null && this.spans[state.token]) this.reveal(this.spans[state.token]);
    // Keep elements that have not changed: an element replaced between press and release gets no click.
    const shown = [head.model, head.layer, head.index, head.ready, token, state.view, state.log, state.from, theme()].join();
    if (this.shown === shown) return;
    this.shown = shown;
    for (const button of this.which.children) button.setAttribute("aria-pressed", String(button.dataset.from === state.from));
    const known = token !== null && token !== undefined && token < tokens.length && head.ready;
    for (const list of this.lists) list.hidden = !known;
    if (!known) {
      this.say.textContent = "Choose a token, here or in the map: the text then shows what it reads.";
      return this.colour(null);
    }
    const row = head.rowOf(token), column = head.columnOf(token);
    const total = valuesOf(row, "total"), kept = entropy(total), received = valuesOf(column, "total").reduce((a, b) => a + b, 0);
    const name = () => make("bdi", { className: "token", textContent: tokenName(tokens, token) }), soft = (textContent) => make("span", { className: "soft", textContent });
    this.say.replaceChildren(...(state.from === "in" ? ["The colour of a token shows how much it takes from "] : ["The colour of a token shows how much is taken from it by "]),
      make("span", { className: "here" }, name(), ` (${token})`), ".");
    this.outTitle.replaceChildren(name(), " reads ", soft(`about ${number(Math.exp(kept), 3)} tokens`));
    this.inTitle.replaceChildren(name(), " is read by ", soft(`weights sum to ${number(received, 3)}`));
    this.list(this.out, row, (other) => [token, other]);
    this.list(this.in, column, (other) => [other, token]);
    this.colour(state.from === "in" ? column : row, token);
  }

  // Scroll the text, not the page.
  reveal(span) {
    const box = this.strip.getBoundingClientRect(), { top, bottom } = span.getBoundingClientRect();
    if (top < box.top || bottom > box.bottom) this.strip.scrollTop += top - box.top - box.height / 2;
  }

  list(element, values, pair) {
    const head = headOf(this.panel.place), shown = valuesOf(values, state.view === "gamma" ? "total" : state.view);
    const best = largest(shown, LISTED), most = shown[best[0]] || 1;
    element.replaceChildren(...best.filter((i) => shown[i] > 0).map((i) => {
      const { responsibilities } = head.pair(...pair(i));
      const bar = make("span", { className: "bar" });
      responsibilities.forEach((share, r) => {
        const part = make("span");
        Object.assign(part.style, { width: `${(100 * share * shown[i]) / most}%`, background: tint(head.components > 1 ? r : null, 1) });
        bar.append(part);
      });
      return make("li", { onclick: () => update({ token: i }, { reveal: true }) },
        make("bdi", { className: "token", textContent: tokenName(this.tokens, i) }), make("span", { className: "soft index", textContent: i }),
        bar, make("span", { className: "value", textContent: number(shown[i], 3) }));
    }));
  }

  colour(values, token) {
    this.classes = () => "";
    if (values) {
      const { view, log } = state, shown = valuesOf(values, view === "gamma" ? "total" : view);
      const most = shown.reduce((a, b) => Math.max(a, b), 1e-30);
      const winner = (i) => values.reduce((best, part, r) => (part[i] > values[best][i] ? r : best), 0);
      const component = view === "total" || values.length === 1 ? null : view === "gamma" ? winner : () => Number(view.slice(1)) - 1;
      this.classes = (i) => {
        const shade = Math.round(SHADES * level(shown[i], most, log)), here = i === token ? " here" : "";
        return (shade ? `s${shade}${component ? ` k${component(i) % 6}` : ""}` : "") + here;
      };
    }
    this.colourVisible();
  }

  colourVisible() {
    const box = this.strip.getBoundingClientRect();
    const visible = this.chunks.map((chunk) => chunk.getBoundingClientRect()).map(({ top, bottom }) => bottom >= box.top && top <= box.bottom);
    visible.forEach((yes, c) => {
      if (!yes) return;
      for (let i = c * CHUNK; i < Math.min((c + 1) * CHUNK, this.spans.length); i++) {
        const wanted = this.classes(i), span = this.spans[i];
        if (span.className !== wanted) span.className = wanted;
      }
    });
  }
}

// Indices of the `count` largest values, largest first, in one pass.
function largest(values, count) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === count && values[i] <= values[best[count - 1]]) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}
