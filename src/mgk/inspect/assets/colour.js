// Colours safe for colour-blind readers (after Okabe and Ito): purple for the total, one hue per component.

const PALETTE = {
  light: {
    paper: [255, 255, 255],
    accent: [98, 60, 152],
    total: [[255, 255, 255], [226, 226, 242], [164, 152, 208], [98, 60, 152], [38, 10, 74]],
    components: [[0, 104, 172], [205, 85, 0], [0, 138, 102], [182, 84, 140], [120, 110, 0], [60, 60, 60]],
  },
  dark: {
    paper: [14, 17, 24],
    accent: [190, 150, 240],
    total: [[14, 17, 24], [50, 32, 92], [128, 58, 150], [226, 116, 148], [255, 238, 205]],
    components: [[86, 180, 233], [240, 150, 40], [40, 200, 150], [230, 150, 200], [225, 215, 80], [210, 210, 210]],
  },
};

const ramps = new Map();

// 256 colours from the background to the full colour. `component` is 0, 1, ... or null for the total.
function ramp(theme, component) {
  const name = `${theme}/${component}`;
  if (ramps.has(name)) return ramps.get(name);
  const { paper, total, components } = PALETTE[theme];
  const stops = component === null ? total : [paper, components[component % components.length]];
  const table = new Uint8Array(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(at)), t = at - k;
    for (let c = 0; c < 3; c++) table[3 * i + c] = Math.round(stops[k][c] * (1 - t) + stops[k + 1][c] * t);
  }
  ramps.set(name, table);
  return table;
}

const rgb = ([r, g, b]) => `rgb(${r},${g},${b})`;
const hue = (theme, r) => (r === null ? PALETTE[theme].accent : PALETTE[theme].components[r % PALETTE[theme].components.length]);

const LOG_DECADES = 4;

// Map a weight to the colour scale, 0 to 1.
function level(value, peak, log) {
  if (!(value > 0)) return 0;
  const t = log ? 1 + Math.log10(value / peak) / LOG_DECADES : value / peak;
  return t < 0 ? 0 : t > 1 ? 1 : t;
}

// Paint `values` (one array per component, `width` wide) into `pixels` (RGBA, `stride` wide) at (x, y).
function paint(values, width, height, pixels, stride, x, y, { view, log, theme, peak }) {
  const M = values.length, chosen = view.startsWith("c") ? Math.min(M, Number(view.slice(1))) - 1 : null;
  const plain = view === "total" || M === 1; // with one component, it is the total
  const tables = plain ? [ramp(theme, null)] : values.map((_, r) => ramp(theme, r));
  const inverse = 1 / peak, perDecade = 1 / (Math.LN10 * LOG_DECADES);
  for (let i = 0; i < height; i++)
    for (let j = 0, from = i * width, to = 4 * ((y + i) * stride + x); j < width; j++, from++, to += 4) {
      let value = 0, winner = 0;
      if (chosen !== null) { value = values[chosen][from]; winner = chosen; }
      else for (let r = 0; r < M; r++) {
        value += values[r][from];
        if (values[r][from] > values[winner][from]) winner = r;
      }
      let t = value * inverse;
      if (log) t = t > 0 ? 1 + Math.log(t) * perDecade : 0;
      const at = 3 * (t <= 0 ? 0 : t >= 1 ? 255 : (t * 255 + 0.5) | 0);
      const table = tables[plain ? 0 : winner];
      pixels[to] = table[at]; pixels[to + 1] = table[at + 1]; pixels[to + 2] = table[at + 2]; pixels[to + 3] = 255;
    }
}

// The colour ramps in use: null for the total, or the components that are shown.
function rampsOf({ components }, view) {
  if (view === "total" || components === 1) return [null];
  return view === "gamma" ? [...Array(components).keys()] : [Math.min(components, Number(view.slice(1))) - 1];
}

// Format a number: four digits, with a power of ten if it is very small or large.
function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) return String(Number(value.toPrecision(digits)));
  return value.toExponential(digits - 2).replace("e", "·10^").replace("^+", "^").replace(/\^(-?\d+)/, (_, p) => superscript(p));
}

const superscript = (text) => [...text].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("");
