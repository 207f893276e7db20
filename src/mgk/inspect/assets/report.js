// The report above the explorer: paragraphs, tables and charts.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function drawReport() {
  const section = document.getElementById("report");
  section.hidden = !DATA.report.length;
  section.replaceChildren(...DATA.report.map((block) => {
    const title = block.title ? [make("h2", { textContent: block.title })] : [];
    if (block.kind === "text") return make("div", { className: "block wide" }, ...title, make("p", { textContent: block.text }));
    if (block.kind === "chart") return make("figure", { className: "block" }, ...title, chart(block));
    const row = (cells, tag) => make("tr", {}, ...cells.map((text) => make(tag, { textContent: text })));
    return make("div", { className: "block wide" }, ...title,
      make("div", { className: "scroll" }, make("table", { className: "numbers" }, make("thead", {}, row(block.header, "th")), make("tbody", {}, ...block.rows.map((cells) => row(cells, "td"))))));
  }));
}

const CHART = { width: 520, height: 300, left: 62, right: 14, top: 12, bottom: 44 };
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4", "1 5"];

function chart({ series, x_label, y_label, log_x, log_y, title }) {
  const { width, height, left, right, top, bottom } = CHART;
  const usable = series.map((s) => ({ ...s, points: s.x.map((x, i) => [x, s.y[i]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y) && (!log_x || x > 0) && (!log_y || y > 0)) }));
  const all = usable.flatMap((s) => s.points);
  const axis = (values, log, from, to) => {
    // Not Math.min(...values): a call takes some 120,000 arguments at most.
    let [low, high] = values.length ? values.reduce(([least, most], v) => [Math.min(least, v), Math.max(most, v)], [Infinity, -Infinity]) : [0, 1];
    if (log) [low, high] = [Math.log10(low), Math.log10(high)];
    const margin = (high - low || Math.abs(high) || 1) * 0.04;
    [low, high] = [low - margin, high + margin];
    return { to: (v) => from + (((log ? Math.log10(v) : v) - low) / (high - low)) * (to - from), ticks: ticks(low, high, log) };
  };
  const X = axis(all.map((p) => p[0]), log_x, left, width - right), Y = axis(all.map((p) => p[1]), log_y, height - bottom, top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title || y_label, class: "chart" });
  for (const v of X.ticks) root.append(svg("line", { x1: X.to(v), x2: X.to(v), y1: top, y2: height - bottom, class: "grid" }), svg("text", { x: X.to(v), y: height - bottom + 16, "text-anchor": "middle" }, short(v)));
  for (const v of Y.ticks) root.append(svg("line", { x1: left, x2: width - right, y1: Y.to(v), y2: Y.to(v), class: "grid" }), svg("text", { x: left - 6, y: Y.to(v) + 4, "text-anchor": "end" }, short(v)));
  root.append(svg("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, x_label),
    svg("text", { transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, y_label));
  usable.forEach(({ points }, s) => {
    const style = `--light:${rgb(hue("light", s))};--dark:${rgb(hue("dark", s))}`, dash = DASHES[s % DASHES.length];
    root.append(svg("path", { d: points.map(([x, y], i) => `${i ? "L" : "M"}${X.to(x).toFixed(1)} ${Y.to(y).toFixed(1)}`).join(""), class: "curve", style, "stroke-dasharray": dash }));
    if (points.length <= 24) for (const [x, y] of points) root.append(svg("circle", { cx: X.to(x), cy: Y.to(y), r: points.length > 1 ? 3 : 6, class: "dot", style }));
  });
  const cursor = svg("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" }), readout = make("span", { className: "soft readout" });
  root.append(cursor);
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
    const near = usable.map((s) => s.points.reduce((best, p) => (!best || Math.abs(X.to(p[0]) - x) < Math.abs(X.to(best[0]) - x) ? p : best), null));
    if (!near.some(Boolean)) return;
    const at = near.find(Boolean)[0];
    cursor.removeAttribute("visibility");
    cursor.setAttribute("x1", X.to(at)); cursor.setAttribute("x2", X.to(at));
    readout.textContent = `${x_label} ${short(at)}: ${usable.map((s, i) => (near[i] ? `${s.name} ${number(near[i][1], 4)}` : "")).filter(Boolean).join(", ")}`;
  });
  const keys = usable.map(({ name }, s) => {
    const style = `--light:${rgb(hue("light", s))};--dark:${rgb(hue("dark", s))}`;
    return make("span", { className: "key" }, svg("svg", { width: 26, height: 10 }, svg("path", { d: "M0 5H26", class: "curve", style, "stroke-dasharray": DASHES[s % DASHES.length] })), name);
  });
  return make("div", {}, root, make("div", { className: "keys" }, ...keys), readout);
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
