// The numbers of a head and of its layer, each with its meaning beside it.

const percent = (x) => (x === undefined ? "–" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}\u00a0%`);

function headFacts(facts, h) {
  const head = facts.heads[h], count = facts.heads.length;
  const found = [
    ["Keys per query", number(Math.exp(head.entropy), 3), `How many of the ${head.size} tokens a query reads, on average: exp of the entropy, ${number(head.entropy, 3)} nats.`],
    ["Rank of the map", head.rank === null ? "not computed" : `${head.rank} of ${head.size}`, "How many rows are not combinations of others: singular values above 10⁻⁶."],
  ];
  if (count > 1) found.push(["Different heads", `${number(facts.effective, 3)} of ${count}`, `How many heads of this layer do different things: 1 if all have the same map, ${count} if no two resemble each other.`]);
  if (head.separation !== null && head.components > 1)
    found.push(["Distance of components", `${number(head.separation, 3)} σ`, "Between the two keys of a token, in standard deviations: near 0, they are the same key."]);
  return make("dl", { className: "factlist" }, ...found.flatMap(([name, value, meaning]) => [
    make("dt", {}, name, make("b", { textContent: value })),
    make("dd", { className: "soft", textContent: meaning }),
  ]));
}

function componentTable(head) {
  const measures = [
    ["Prior", head.prior, "Its weight before a query is known; learned."],
    ["Share", head.share, "How much of the attention comes from it."],
    ["Strongest", head.wins, "How often it has the largest responsibility of a pair."],
    ["Needed", head.removal, "How much of a row would move to other keys without it."],
  ].filter(([, values]) => values);
  const names = head.share.map((_, r) => {
    const dot = make("i", { className: "dot" });
    dot.style.background = tint(r, 1);
    return make("th", { scope: "col", "aria-label": `component ${r + 1}` }, dot, `${r + 1}`);
  });
  const rows = measures.map(([name, values, meaning]) => make("tr", {},
    make("th", { scope: "row" }, name, make("span", { className: "soft", textContent: meaning })),
    ...head.share.map((_, r) => make("td", { textContent: percent(values[r]) }))));
  return make("table", { className: "components" },
    make("thead", {}, make("tr", {}, make("th", { scope: "col", textContent: "Component" }), ...names)),
    make("tbody", {}, ...rows));
}

// A square per pair of heads; `choose` gets the other head of a pair that contains head `h`.
function similarHeads({ cosine, overlap }, h, choose) {
  const table = ramp(theme(), null);
  const cells = cosine.flatMap((row, a) => row.map((value, b) => {
    const name = `Heads ${a + 1} and ${b + 1}: cosine ${number(value, 3)}`, at = 3 * Math.round(255 * clamp(value, 0, 1) * 0.85);
    const cell = make("button", { type: "button", className: "cell", tabIndex: -1, "aria-label": name,
      title: `${name}, overlap ${number(100 * overlap[a][b], 3)} %`, onclick: () => choose(a === h ? b : a) });
    cell.style.background = `rgb(${table[at]},${table[at + 1]},${table[at + 2]})`;
    if (a === h || b === h) cell.classList.add("mine");
    return cell;
  }));
  const grid = make("div", { className: "similarity", role: "group", "aria-label": "Similarity of the heads of this layer" }, ...cells);
  grid.style.setProperty("--columns", cosine.length);
  return make("div", { className: "alike" },
    make("h3", { textContent: "Similar heads" }),
    make("p", { className: "say", textContent: "Rows and columns are the heads of this layer: the stronger the colour, the more alike two maps are (cosine)." }), grid);
}

// What the model predicts for its input, and whether that is right.
function answerLine({ what, options, truth }) {
  const shown = (text) => make("bdi", { className: "token", textContent: tokenName([text], 0) });
  const soft = (textContent) => make("span", { className: "soft", textContent });
  const [[best, probability], ...rest] = options;
  const right = best === truth;
  const parts = [soft(`Predicted ${what}: `), shown(best), ` ${percent(probability)}`];
  if (rest.length) parts.push(soft(", then "), ...rest.flatMap(([name, p], k) => [k ? soft(", ") : "", shown(name), soft(` ${percent(p)}`)]));
  if (truth !== null) parts.push(soft(`. True ${what}: `), shown(truth), " ", make("span", { className: right ? "right" : "wrong", textContent: right ? "✓ right" : "✗ wrong" }));
  return parts;
}
