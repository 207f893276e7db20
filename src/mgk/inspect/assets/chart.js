// Line charts, drawn in the pixels that there are, so that their text keeps its size.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 48, right: 10, top: 8, bottom: 40 };
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4", "1 5"];

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function chart(block) {
  const lines = block.series.map((s) => ({ ...s, points: pointsOf(s, block) }));
  const place = make("div", { className: "plot" }), readout = make("span", { className: "soft readout", textContent: "Point at the chart to read its values." });
  const keys = make("div", { className: "keys" }, ...lines.map(({ name }, s) => {
    const sample = svg("path", { d: "M0 5H26", class: "curve", "stroke-dasharray": DASHES[s % DASHES.length] });
    setSeries(sample, s);
    return make("span", { className: "key" }, svg("svg", { width: 26, height: 10 }, sample), name);
  }));
  let width = 0;
  new ResizeObserver(() => {
    if (!place.clientWidth || place.clientWidth === width) return;
    width = place.clientWidth;
    place.replaceChildren(plot(block, lines, width, readout));
  }).observe(place);
  return make("div", {}, place, keys, readout);
}

// [x, y, low, high] of the points that the axes can show.
function pointsOf({ x, y, low, high }, { log_x, log_y }) {
  return x.map((at, i) => [at, y[i], low ? low[i] : y[i], high ? high[i] : y[i]])
    .filter(([at, ...values]) => Number.isFinite(at) && (!log_x || at > 0) && values.every((v) => Number.isFinite(v) && (!log_y || v > 0)));
}

// A function from values to pixels, and the marks of the axis.
function axis(values, log, from, to) {
  // Not Math.min(...values): a call takes some 120,000 arguments at most.
  let [low, high] = values.length ? values.reduce(([least, most], v) => [Math.min(least, v), Math.max(most, v)], [Infinity, -Infinity]) : [0, 1];
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const margin = (high - low || Math.abs(high) || 1) * 0.04;
  [low, high] = [low - margin, high + margin];
  return { to: (v) => from + (((log ? Math.log10(v) : v) - low) / (high - low)) * (to - from), ticks: ticks(low, high, log) };
}

function plot({ x_label, y_label, log_x, log_y, title }, lines, width, readout) {
  const height = Math.round(clamp(0.56 * width, 190, 300)), { left, right, top, bottom } = MARGIN;
  const all = lines.flatMap((line) => line.points);
  const X = axis(all.map((p) => p[0]), log_x, left, width - right), Y = axis(all.flatMap((p) => p.slice(1)), log_y, height - bottom, top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title || y_label, class: "chart" });
  for (const v of X.ticks) root.append(svg("line", { x1: X.to(v), x2: X.to(v), y1: top, y2: height - bottom, class: "grid" }), svg("text", { x: X.to(v), y: height - bottom + 16, "text-anchor": "middle" }, short(v)));
  for (const v of Y.ticks) root.append(svg("line", { x1: left, x2: width - right, y1: Y.to(v), y2: Y.to(v), class: "grid" }), svg("text", { x: left - 6, y: Y.to(v) + 4, "text-anchor": "end" }, short(v)));
  root.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x_label),
    svg("text", { transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y_label));
  lines.forEach(({ points, low }, s) => {
    const path = (values) => values.map(([x, y], i) => `${i ? "L" : "M"}${X.to(x).toFixed(1)} ${Y.to(y).toFixed(1)}`).join("");
    const drawn = [svg("path", { d: path(points), class: "curve", "stroke-dasharray": DASHES[s % DASHES.length] })];
    if (low) drawn.unshift(svg("path", { d: `${path([...points.map((p) => [p[0], p[2]]), ...points.map((p) => [p[0], p[3]]).reverse()])}Z`, class: "band" }));
    if (points.length <= 24) drawn.push(...points.map(([x, y]) => svg("circle", { cx: X.to(x), cy: Y.to(y), r: 3, class: "dot" })));
    for (const element of drawn) setSeries(element, s);
    root.append(...drawn);
  });
  followPointer(root, lines, X, { top, bottom: height - bottom, x_label, readout });
  return root;
}

// A vertical line at the nearest x, and below the chart the values of the lines that have a point there.
function followPointer(root, lines, X, { top, bottom, x_label, readout }) {
  const cursor = svg("line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" });
  root.append(cursor);
  const known = [...new Set(lines.flatMap(({ points }) => points.map(([x]) => x)))];
  root.addEventListener("pointermove", (event) => {
    if (!known.length) return;
    const pointed = event.clientX - root.getBoundingClientRect().left;
    const at = known.reduce((best, x) => (Math.abs(X.to(x) - pointed) < Math.abs(X.to(best) - pointed) ? x : best));
    cursor.removeAttribute("visibility");
    cursor.setAttribute("x1", X.to(at));
    cursor.setAttribute("x2", X.to(at));
    const values = lines.flatMap(({ name, points, low }) => points.filter(([x]) => x === at)
      .map(([, y, least, most]) => `${name} ${number(y, 4)}${low ? ` (${number(least, 4)} to ${number(most, 4)})` : ""}`));
    readout.textContent = `${x_label} ${at.toLocaleString("en")}: ${values.join(", ")}`;
  });
}

function ticks(low, high, log) {
  if (log && high - low >= 1) return Array.from({ length: Math.floor(high) - Math.ceil(low) + 1 }, (_, i) => 10 ** (Math.ceil(low) + i));
  const [from, to] = log ? [10 ** low, 10 ** high] : [low, high], rough = (to - from) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough), found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function short(value) {
  const size = Math.abs(value), units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
  const unit = units.find(([from]) => size >= from);
  return unit ? `${Number((value / (unit[1] === "k" ? 1e3 : unit[0])).toPrecision(3))}${unit[1]}` : String(Number(value.toPrecision(3)));
}
