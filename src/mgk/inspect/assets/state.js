// The state of the page, kept in its address so that a link restores it, and helpers used by all scripts.

const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// For tests and screenshots: body[data-busy] is "0" once everything has been drawn.
let busy = 0;
function track(work) {
  document.body.dataset.busy = String(++busy);
  work.finally(() => { document.body.dataset.busy = String(--busy); });
}

const DEFAULT = { panels: null, active: 0, view: "total", log: false, same: false, token: null, from: "out", zoom: [0, 1, 0, 1], theme: null };
const state = { ...DEFAULT };
let hovered = null; // the pair or token under the pointer; not part of the address

const theme = () => state.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const tint = (component, strength) => `rgba(${hue(theme(), component).join(",")},${strength})`;
const headOf = ({ model, layer, head }) => MODELS[model].layers[layer].heads[head];
const mostComponents = Math.max(1, ...MODELS.flatMap((m) => m.layers.flatMap((l) => l.heads.map((h) => h.components))));

function valid(place) {
  const number = (x) => (Number.isInteger(x) && x >= 0 ? x : 0);
  const model = Math.min(number(place.model), MODELS.length - 1);
  const layer = Math.min(number(place.layer), MODELS[model].layers.length - 1);
  const head = Math.min(number(place.head), MODELS[model].layers[layer].heads.length - 1);
  return { model, layer, head };
}

// The place to open a model at: its most telling head, see `_start` in page.py.
function telling(model) {
  const scores = MODELS[model].layers.map(({ start }) => start.score), layer = scores.indexOf(Math.max(...scores));
  return { model, layer, head: MODELS[model].layers[layer].start.head };
}

// The models to open with: the first, and the first mixture after it or else the second.
function firstModels() {
  const mixture = MODELS.findIndex(({ layers }, model) => model > 0 && layers[0].heads[0].components > 1);
  return [0, mixture > 0 ? mixture : 1].slice(0, MODELS.length);
}

function firstToken({ model, layer }) { return MODELS[model].layers[layer].start.token; }

function readAddress() {
  const found = new URLSearchParams(location.hash.slice(1));
  const places = (found.get("show") ?? "").split(",").filter(Boolean).slice(0, 2);
  const shown = places.map((text) => { const [model, layer, head] = text.split(".").map(Number); return valid({ model, layer, head }); });
  const panels = shown.length ? shown : firstModels().map(telling);
  const view = found.get("view") ?? "total";
  const known = view === "total" || (view === "gamma" && mostComponents > 1) || (/^c[1-9]$/.test(view) && Number(view[1]) <= mostComponents);
  const zoom = (found.get("zoom") ?? "").split("_").map(Number);
  const opened = !shown.length && panels.length ? firstToken(panels[0]) : null;
  const token = found.has("token") ? Number(found.get("token")) : opened;
  const size = panels.length ? MODELS[panels[0].model].tokens.length : 0;
  Object.assign(state, {
    panels,
    active: clamp(Number(found.get("active")) || 0, 0, Math.max(0, panels.length - 1)),
    view: known ? view : "total",
    log: found.get("log") === "1",
    same: found.get("same") === "1",
    token: Number.isInteger(token) && token >= 0 && token < size ? token : null,
    from: found.get("from") === "in" ? "in" : "out",
    zoom: zoom.length === 4 && zoom.every((x) => x >= 0 && x <= 1) && zoom[1] > zoom[0] && zoom[3] > zoom[2] ? zoom : DEFAULT.zoom,
    theme: ["dark", "light"].includes(found.get("theme")) ? found.get("theme") : null,
  });
}

function writeAddress() {
  const parts = [`show=${state.panels.map((p) => `${p.model}.${p.layer}.${p.head}`).join(",")}`];
  if (state.active) parts.push(`active=${state.active}`);
  if (state.view !== "total") parts.push(`view=${state.view}`);
  for (const flag of ["log", "same"]) if (state[flag]) parts.push(`${flag}=1`);
  if (state.token !== null) parts.push(`token=${state.token}`);
  if (state.from !== "out") parts.push(`from=${state.from}`);
  if (zoomed()) parts.push(`zoom=${state.zoom.map((x) => +x.toFixed(5)).join("_")}`);
  if (state.theme) parts.push(`theme=${state.theme}`);
  try { history.replaceState(null, "", `#${parts.join("&")}`); } catch { /* a frame in a notebook has no address */ }
}

// Name of a token: white space becomes visible, and later bytes of a character get a number ("é +1").
function tokenName(tokens, i) {
  let first = i;
  while (first > 0 && tokens[first] === "") first--;
  const text = tokens[first].trim() || tokens[first];
  const short = text.length > 24 ? `${[...text].slice(0, 23).join("")}…` : text;
  const shown = short.replace(/^ +$/, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^$/, "∅");
  return first === i ? shown : `${shown} +${i - first}`;
}
