// The report above the explorer: paragraphs, tables, bars and charts.

function drawReport() {
  const section = document.getElementById("report");
  section.hidden = !DATA.report.length;
  const groups = []; // neighbouring blocks of a kind share a row
  for (const block of DATA.report) {
    if (groups.at(-1)?.[0].kind === block.kind && block.kind !== "text") groups.at(-1).push(block);
    else groups.push([block]);
  }
  section.replaceChildren(...groups.map((blocks) => make("div", { className: `blocks ${blocks[0].kind}s` }, ...blocks.map(reportBlock))));
  if (MODELS.length && DATA.report.length) section.append(make("button", { type: "button", className: "onwards", textContent: "Look inside the models ↓", onclick: () => document.getElementById("explorer").scrollIntoView() }));
}

function reportBlock(block) {
  const title = block.title ? [make("h2", { textContent: block.title })] : [];
  if (block.note) title.push(make("p", { className: "say", textContent: block.note }));
  if (block.kind === "text") return make("div", { className: "block" }, ...title, make("p", { textContent: block.text }));
  if (block.kind === "bars") return make("figure", { className: "block" }, ...title, bars(block));
  if (block.kind === "chart") return make("figure", { className: "block" }, ...title, chart(block));
  const row = (cells, tag) => make("tr", {}, ...cells.map((text) => make(tag, { textContent: text })));
  return make("div", { className: "block" }, ...title, make("div", { className: "scroll", tabIndex: 0 },
    make("table", { className: "numbers" }, make("thead", {}, row(block.header, "th")), make("tbody", {}, ...block.rows.map((cells) => row(cells, "td"))))));
}
