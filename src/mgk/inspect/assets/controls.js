// The toolbar above the panels, and the buttons of the page.

const THEMES = { dark: ["☀", "Light"], light: ["☾", "Dark"] };
const controls = {};

const labelled = (label, title, onclick) => make("button", { type: "button", textContent: label, title, onclick });

const long = (textContent) => make("span", { className: "long", textContent }); // left out on a phone

function viewButton([view, label, title]) {
  const button = labelled(label, title, () => update({ view }));
  if (view[0] !== "c") return [view, button];
  const dot = make("i", { className: "dot" });
  dot.dataset.component = Number(view.slice(1)) - 1;
  button.prepend(dot, long("Component "));
  return [view, button];
}

function makeControls() {
  const components = Array.from({ length: mostComponents }, (_, r) => [`c${r + 1}`, r + 1, `The part of component ${r + 1} (key ${r + 1})`]);
  const views = [["total", "Attention", "The attention weights (key t)"]];
  if (mostComponents > 1) views.push(...components, ["gamma", "Responsibility", "Which component answers (key r)"]);
  controls.views = views.map(viewButton);
  controls.scales = [
    [false, labelled("Linear", "The colour is the weight (key l)", () => update({ log: false }))],
    [true, labelled("Log", "The colour is the logarithm of the weight, to see small ones (key l)", () => update({ log: true }))],
  ];
  controls.same = labelled("Same", "One colour scale for both panels (key s)", () => update({ same: !state.same }));
  controls.same.append(long(" for both"));
  controls.pin = labelled("", "", pin);
  controls.theme = labelled("", "Dark or light (key d)", () => update({ theme: theme() === "dark" ? "light" : "dark" }));
  const help = labelled("?", "Keyboard shortcuts and definitions (key ?)", () => byId("help").showModal());
  controls.theme.className = help.className = "icon";
  byId("views").parentNode.hidden = views.length === 1;
  byId("views").append(...controls.views.map(([, element]) => element));
  byId("scales").append(...controls.scales.map(([, element]) => element));
  byId("layout").append(controls.same, controls.pin);
  byId("save").append(
    labelled("PNG", "Save the maps as PNG (key e)", () => exportAs("png")),
    labelled("SVG", "Save the maps as SVG (key E)", () => exportAs("svg")));
  byId("actions").append(controls.theme, help);
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
  if (controls.two !== two) { // do not replace what is being clicked
    controls.two = two;
    controls.pin.replaceChildren(...(two ? ["One", long(" panel")] : ["Compare", long(MODELS.length > 1 ? " two models" : " two heads")]));
  }
  controls.pin.title = two ? "Show only the active panel (key p)" : "Open a second panel beside this one (key p)";
  const [icon, name] = THEMES[theme()];
  controls.theme.textContent = icon;
  controls.theme.setAttribute("aria-label", name);
}
