// Changes of the state, redrawing, and the box beside the pointer.

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
  const place = state.panels[0];
  const other = MODELS.length > 1 ? telling((place.model + 1) % MODELS.length) : place;
  update({ panels: [place, other], active: 1 });
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
    while (panels.length < state.panels.length) {
      const panel = new Panel(panels.length);
      panels.push(panel);
      byId("panels").append(panel.element);
    }
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
    for (const one of panels.slice(0, state.panels.length)) { one.map.hairs(); one.text.draw(); }
    const head = panel && headOf(panel.place), tip = byId("tip");
    tip.hidden = !(pair && event && head.ready && pair.i !== undefined && pair.j !== undefined);
    if (tip.hidden) return;
    tip.replaceChildren(...tipLines(head, MODELS[panel.place.model].tokens, pair));
    const box = tip.getBoundingClientRect(), x = event.clientX + 16, y = event.clientY + 16;
    tip.style.left = `${x + box.width > innerWidth - 8 ? Math.max(8, event.clientX - box.width - 12) : x}px`;
    tip.style.top = `${y + box.height > innerHeight - 8 ? Math.max(8, event.clientY - box.height - 12) : y}px`;
  });
}

// The weight of a pair, and for a mixture the part and responsibility of each component.
function tipLines(head, tokens, { i, j }) {
  const { weight, parts, responsibilities } = head.pair(i, j);
  const token = (at) => make("bdi", { className: "token", textContent: tokenName(tokens, at) });
  const soft = (textContent) => make("span", { className: "soft", textContent });
  const line = make("div", {}, token(i), soft(` ${i} → `), token(j), soft(` ${j}`));
  const lines = [line, make("div", { className: "weight" }, make("b", { textContent: number(weight) }), soft(" of the query's attention"))];
  if (head.components === 1) return lines;
  return [...lines, ...parts.map((part, r) => {
    const dot = make("i", { className: "dot" });
    dot.style.background = tint(r, 1);
    return make("div", { className: "part" }, dot, `${number(part)} `, soft(`responsibility ${number(responsibilities[r], 3)}`));
  })];
}

const INTRO = "Each row of a map is a token that looks for information (the query), each column a token it can read (the key). The stronger the colour, the more it takes.";

function start() {
  drawReport();
  setTheme();
  byId("explorer").hidden = !MODELS.length;
  if (!MODELS.length) return;
  byId("intro").textContent = INTRO;
  makeHelp();
  makeControls();
  readAddress();
  draw();
  addEventListener("hashchange", () => { readAddress(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  listenToKeys();
}

start();
