// Controls, keyboard shortcuts and redrawing of the page.

const panels = [];
const byId = (id) => document.getElementById(id);

function update(changes, { reveal = false } = {}) {
  Object.assign(state, changes);
  writeAddress();
  draw(reveal);
}

function show(index, changes) {
  const next = state.panels.map((place, i) => (i === index ? valid({ ...place, ...changes }) : place));
  const size = MODELS[next[index].model].tokens.length;
  update({ panels: next, token: state.token !== null && state.token < size ? state.token : null });
}

function activate(index) { if (state.active !== index && index < state.panels.length) update({ active: index }); }

// Open a second panel beside the first, with the next model if there is one; with two panels, close the inactive one.
function pin() {
  if (state.panels.length > 1) return unpin(1 - state.active);
  const place = state.panels[0], other = MODELS.length > 1 ? (place.model + 1) % MODELS.length : place.model;
  update({ panels: [place, valid({ ...place, model: other })], active: 1 });
}

function unpin(index) { update({ panels: state.panels.filter((_, i) => i !== index), active: 0 }); }

let waiting = false;
function draw(reveal) {
  draw.reveal ||= reveal;
  if (waiting) return;
  waiting = true;
  track(new Promise((done) => requestAnimationFrame(() => {
    waiting = false;
    drawControls();
    while (panels.length < state.panels.length) { const panel = new Panel(panels.length); panels.push(panel); byId("panels").append(panel.element); }
    byId("panels").classList.toggle("two", state.panels.length > 1);
    panels.forEach((panel, i) => { panel.element.hidden = i >= state.panels.length; });
    const shown = draw.reveal;
    draw.reveal = false;
    done(Promise.all(panels.slice(0, state.panels.length).map((panel) => panel.draw(shown))));
  })));
}

let pointing = null;
function hover(pair, panel, event) {
  hovered = pair;
  cancelAnimationFrame(pointing);
  pointing = requestAnimationFrame(() => {
    const tip = byId("tip");
    for (const one of panels.slice(0, state.panels.length)) { one.map.hairs(); one.inspector.draw(); }
    const head = panel && headOf(panel.place);
    tip.hidden = !(pair && event && head.ready && pair.i !== undefined && pair.j !== undefined);
    if (tip.hidden) return;
    const { tokens } = MODELS[panel.place.model], { weight, parts, responsibilities } = head.pair(pair.i, pair.j);
    tip.replaceChildren(
      make("div", {}, make("bdi", { className: "token", textContent: tokenName(tokens, pair.i) }), make("span", { className: "soft", textContent: ` ${pair.i} → ` }), make("bdi", { className: "token", textContent: tokenName(tokens, pair.j) }), make("span", { className: "soft", textContent: ` ${pair.j}` })),
      make("div", { className: "weight" }, make("b", { textContent: number(weight) }), make("span", { className: "soft", textContent: " of the query's attention" })),
      ...(head.components > 1 ? parts.map((part, r) => {
        const dot = make("i", { className: "dot" });
        dot.style.background = tint(r, 1);
        return make("div", { className: "part" }, dot, `${number(part)} `, make("span", { className: "soft", textContent: `responsibility ${number(responsibilities[r], 3)}` }));
      }) : []));
    const box = tip.getBoundingClientRect(), x = event.clientX + 16, y = event.clientY + 16;
    tip.style.left = `${x + box.width > innerWidth - 8 ? Math.max(8, event.clientX - box.width - 12) : x}px`;
    tip.style.top = `${y + box.height > innerHeight - 8 ? Math.max(8, event.clientY - box.height - 12) : y}px`;
  });
}

const THEMES = { dark: ["☀", "Light"], light: ["☾", "Dark"] };
const controls = {};

function makeControls() {
  const button = (label, title, onclick) => make("button", { type: "button", textContent: label, title, onclick });
  const views = [["total", "Total", "The attention weights (t)"], ...(mostComponents > 1 ? [
    ...Array.from({ length: mostComponents }, (_, r) => [`c${r + 1}`, r + 1, `Contribution of component ${r + 1} (${r + 1})`]),
    ["gamma", "Responsibility", "Hue: component with the largest responsibility. Brightness: the weight (r)"]] : [])];
  controls.views = views.map(([view, label, title]) => [view, button(label, title, () => update({ view }))]);
  controls.views.forEach(([view, element]) => { if (view[0] === "c") { const dot = make("i", { className: "dot" }); dot.dataset.component = Number(view.slice(1)) - 1; element.prepend(dot, make("span", { className: "long", textContent: "Component " })); } });
  controls.scales = [[false, button("Linear", "Brightness is the weight (l)", () => update({ log: false }))], [true, button("Log", "Brightness is the logarithm of the weight (l)", () => update({ log: true }))]];
  controls.same = button("Same scale", "Use one colour scale for both panels (s)", () => update({ same: !state.same }));
  controls.pin = button("", "", pin);
  controls.theme = button("", "Dark or light (d)", () => update({ theme: theme() === "dark" ? "light" : "dark" }));
  controls.theme.className = "icon";
  const help = button("?", "Keyboard shortcuts and definitions (?)", () => byId("help").showModal());
  help.className = "icon";
  byId("views").append(...controls.views.map(([, element]) => element));
  byId("scales").append(...controls.scales.map(([, element]) => element));
  byId("actions").append(controls.same, controls.pin, button("PNG", "Save the maps as PNG (e)", () => exportAs("png")), button("SVG", "Save the maps as SVG (E)", () => exportAs("svg")), controls.theme, help);
}

function setTheme() {
  const { dataset, style } = document.documentElement, tone = theme();
  if (dataset.theme === tone) return;
  dataset.theme = tone;
  for (let r = 0; r < 6; r++) style.setProperty(`--c${r}`, hue(tone, r).join(","));
}

function drawControls() {
  setTheme();
  for (const [view, element] of controls.views) element.setAttribute("aria-pressed", String(view === state.view));
  for (const [log, element] of controls.scales) element.setAttribute("aria-pressed", String(log === state.log));
  for (const dot of document.querySelectorAll("#views .dot")) dot.style.background = tint(Number(dot.dataset.component), 1);
  const two = state.panels.length > 1;
  controls.same.hidden = !two;
  controls.same.setAttribute("aria-pressed", String(state.same));
  controls.pin.textContent = two ? "One map" : MODELS.length > 1 ? "Compare" : "Pin";
  controls.pin.title = two ? "Show only the active panel (p)" : "Compare this head with another one (p)";
  const [icon, name] = THEMES[theme()];
  controls.theme.textContent = icon;
  controls.theme.setAttribute("aria-label", name);
}

const step = (name, by) => { const place = state.panels[state.active]; show(state.active, { [name]: Math.max(0, place[name] + by) }); };
const walk = (by) => {
  const size = MODELS[state.panels[state.active].model].tokens.length;
  update({ token: state.token === null ? 0 : clamp(state.token + by, 0, size - 1) }, { reveal: true });
};
const view = (name) => () => { if (controls.views.some(([known]) => known === name)) update({ view: name }); };

const KEYS = {
  ArrowLeft: () => step("head", -1), ArrowRight: () => step("head", 1), ArrowUp: () => step("layer", -1), ArrowDown: () => step("layer", 1),
  t: view("total"), r: view("gamma"), l: () => update({ log: !state.log }), s: () => update({ same: !state.same }), p: pin,
  m: () => show(state.active, { model: (state.panels[state.active].model + 1) % MODELS.length }),
  a: () => update({ active: (state.active + 1) % state.panels.length }),
  "[": () => walk(-1), "]": () => walk(1), x: () => update({ from: state.from === "in" ? "out" : "in" }),
  "/": () => panels[state.active].inspector.search.focus(),
  "+": () => zoomBy(0.7), "=": () => zoomBy(0.7), "-": () => zoomBy(1 / 0.7), 0: () => update({ zoom: [0, 1, 0, 1] }),
  d: () => controls.theme.click(), e: () => exportAs("png"), E: () => exportAs("svg"), "?": () => byId("help").showModal(),
  Escape: () => update({ token: null }),
};
for (let r = 1; r <= Math.min(9, mostComponents); r++) KEYS[r] = view(`c${r}`);

const HELP = [
  ["← →", "head"], ["↑ ↓", "layer"], ["t, 1…9, r", "total, one component, responsibility"], ["l", "linear or logarithmic"], ["[ ]", "previous, next token"], ["/", "find a token"],
  ["x", "attends to, attended to by"], ["+ − 0", "zoom in, zoom out, show all; or Ctrl and wheel, drag and double click"], ["p", "compare two maps, or show one"], ["a", "the other panel"], ["m", "next model"],
  ["s", "same colour scale in both panels"], ["e, E", "save as PNG, SVG"], ["d", "dark or light"], ["Esc", "clear the token"],
];
const MEANINGS = [
  ["Map", "Row i, column j: the attention weight of query i for key j. Every row sums to 1."],
  ["Component", "A key is a mixture of components. The map of a component is its contribution; the maps of all components sum to the total."],
  ["Responsibility", "Posterior probability of a component given a pair (Eqn 11). Hue: the component with the largest one; brightness: the weight."],
  ["Rank", "Number of singular values of the map above 10⁻⁶."],
  ["Effective heads", "exp of the entropy of the eigenvalues of the heads' cosine similarity: 1 if all heads are equal."],
  ["Removal", "How much the rows change, in total variation, if a component is removed from the mixture."],
];

function start() {
  byId("help").append(make("form", { method: "dialog" }, make("h2", { textContent: "Keyboard shortcuts" }), make("dl", {}, ...HELP.flatMap(([key, text]) => [make("dt", { textContent: key }), make("dd", { textContent: text })])),
    make("h2", { textContent: "Definitions" }), make("dl", {}, ...MEANINGS.flatMap(([key, text]) => [make("dt", { textContent: key }), make("dd", { textContent: text })])), make("button", { textContent: "Close" })));
  drawReport();
  if (!MODELS.length) { setTheme(); document.querySelector(".tools").hidden = true; return; }
  makeControls();
  readAddress();
  draw();
  addEventListener("hashchange", () => { readAddress(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, select, textarea") || byId("help").open;
    if (event.key === "Escape" && event.target.matches?.("input")) return event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

start();
