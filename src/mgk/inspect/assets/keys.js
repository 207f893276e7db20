// Keyboard shortcuts, and the dialog that lists them.

const step = (name, by) => {
  const place = state.panels[state.active];
  show(state.active, { [name]: Math.max(0, place[name] + by) });
};

const walk = (by) => {
  const size = MODELS[state.panels[state.active].model].tokens.length;
  update({ token: state.token === null ? 0 : clamp(state.token + by, 0, size - 1) }, { reveal: true });
};

const view = (name) => () => { if (controls.views.some(([known]) => known === name)) update({ view: name }); };

const KEYS = {
  ArrowLeft: () => step("head", -1),
  ArrowRight: () => step("head", 1),
  ArrowUp: () => step("layer", -1),
  ArrowDown: () => step("layer", 1),
  t: view("total"),
  r: view("gamma"),
  l: () => update({ log: !state.log }),
  s: () => update({ same: !state.same }),
  p: () => pin(),
  m: () => show(state.active, { model: (state.panels[state.active].model + 1) % MODELS.length }),
  a: () => update({ active: (state.active + 1) % state.panels.length }),
  "[": () => walk(-1),
  "]": () => walk(1),
  x: () => update({ from: state.from === "in" ? "out" : "in" }),
  "/": () => panels[state.active].text.search.focus(),
  "+": () => zoomBy(0.7),
  "=": () => zoomBy(0.7),
  "-": () => zoomBy(1 / 0.7),
  0: () => update({ zoom: DEFAULT.zoom }),
  d: () => controls.theme.click(),
  e: () => exportAs("png"),
  E: () => exportAs("svg"),
  "?": () => byId("help").showModal(),
  Escape: () => update({ token: null }),
};
for (let r = 1; r <= Math.min(9, mostComponents); r++) KEYS[r] = view(`c${r}`);

const HELP = [
  ["← →", "head"],
  ["↑ ↓", "layer"],
  ["t, 1…9, r", "attention, the part of one component, responsibility"],
  ["l", "linear or logarithmic colours"],
  ["[ ]", "previous, next token"],
  ["/", "find a token"],
  ["x", "keys that a token reads, or queries that read it"],
  ["+ − 0", "zoom in, zoom out, show all; or Ctrl and wheel, drag, double click"],
  ["p", "two panels or one"],
  ["a", "the other panel"],
  ["m", "next model"],
  ["s", "same colour scale in both panels"],
  ["e, E", "save as PNG, SVG"],
  ["d", "dark or light"],
  ["Esc", "clear the token"],
];

const MEANINGS = [
  ["Query, key", "Each token asks with its query and is found by its key. The attention weight says how much the query takes from that token."],
  ["Map", "Row i, column j: the weight of query i for key j. Every row sums to 1."],
  ["Component", "A mixture key has several components, so one token can be found in several ways. The parts of all components sum to the weight."],
  ["Responsibility", "Probability that a component made the match of a query and a key (Eqn 11 of the paper)."],
];

function makeHelp() {
  const list = (entries) => make("dl", {}, ...entries.flatMap(([key, text]) => [make("dt", { textContent: key }), make("dd", { textContent: text })]));
  byId("help").append(make("form", { method: "dialog" },
    make("button", { className: "close", textContent: "Close" }), // first: a dialog scrolls to what it focuses
    make("h2", { textContent: "Keyboard shortcuts" }), list(HELP),
    make("h2", { textContent: "Definitions" }), list(MEANINGS)));
}

function listenToKeys() {
  addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, select, textarea") || byId("help").open;
    if (event.key === "Escape" && event.target.matches?.("input")) return event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}
