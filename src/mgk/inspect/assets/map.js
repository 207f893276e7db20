// The large map: first the pooled picture, then exact tiles if the zoom is close enough.

const EDGE = 6;
const EXACT = 1024; // up to this many positions the full map is computed
const FRAME = 14; // milliseconds per animation frame for computing tiles

class MapView {
  constructor(panel) {
    this.panel = panel;
    this.canvas = make("canvas", { className: "map", tabIndex: 0, role: "img" });
    this.rowHair = make("div", { className: "hair" });
    this.columnHair = make("div", { className: "hair" });
    this.chosen = make("div", { className: "hair chosen" });
    this.element = make("div", { className: "mapbox" }, this.canvas, this.chosen, this.rowHair, this.columnHair);
    this.pointers = new Map();
    this.listen();
  }

  get head() { return headOf(this.panel.place); }
  // Margin for the labels: token names if they are shown, otherwise numbers.
  get pad() {
    const named = this.width / (this.window[1] - this.window[0]) >= 12, { longestToken } = MODELS[this.panel.place.model];
    return AXIS_TITLE + (named ? clamp(10 + 7 * longestToken, 34, 64) : 34);
  }
  get side() { return this.width - this.pad - EDGE; }
  get square() { return { x: this.pad, y: this.pad, side: this.side }; }

  // Positions at the edges of the visible part: [top, bottom, left, right].
  get window() { return state.zoom.map((x) => x * this.head.size); }

  peak() {
    const of = (head) => (this.exact ? head.peak : head.basePeak ?? head.peak);
    return state.same ? Math.max(...state.panels.map((place) => of(headOf(place)))) : of(this.head);
  }

  look() { return { view: state.view, log: state.log, theme: theme(), peak: this.peak() }; }

  draw() {
    this.width = this.element.clientWidth;
    if (!this.width || !this.panel.place) return;
    const density = window.devicePixelRatio || 1, { head } = this, [i0, i1, j0, j1] = this.window;
    this.exact = head.size <= EXACT || (this.side * density) / Math.max(i1 - i0, j1 - j0) >= 0.5;
    const look = this.look(), shown = [head.model, head.layer, head.index, ...Object.values(look), this.width, density, this.exact, !!head.pooled];
    const drawn = [...shown, ...state.zoom, head.ready].join();
    this.hairs();
    this.element.classList.toggle("zoomed", zoomed());
    if (this.drawn === drawn && !this.missing?.length) return;
    this.drawn = drawn;
    if (this.colours !== shown.join()) { this.colours = shown.join(); this.picture = null; }
    this.picture ??= head.pooled && basePicture(head, look);
    const context = this.canvas.getContext("2d"), pixels = Math.round(this.width * density);
    if (this.canvas.width !== pixels) this.canvas.width = this.canvas.height = pixels;
    context.setTransform(density, 0, 0, density, 0, 0);
    context.clearRect(0, 0, this.width, this.width);
    this.missing = drawMap(context, head, this.window, look, this.square, this.exact, this.picture);
    drawAxes(context, MODELS[this.panel.place.model].tokens, this.window, this.square, getComputedStyle(document.documentElement));
    drawAxisTitles(context, this.square, getComputedStyle(document.documentElement));
    this.canvas.dataset.pad = this.pad;
    this.canvas.setAttribute("aria-label", `Attention map, ${this.panel.title}: queries downwards, keys to the right`);
    if (this.missing.length) this.fill();
  }

  // Compute missing tiles, starting at the top left, for FRAME milliseconds per animation frame.
  fill() {
    if (this.filling || !this.head.ready) return;
    this.filling = true;
    track(new Promise((done) => requestAnimationFrame(() => {
      this.filling = false;
      done();
      if (!this.panel.place || !this.head.ready) return; // another head was chosen, which is drawn separately
      const until = performance.now() + FRAME, { head } = this;
      for (const [a, b] of this.missing) {
        head.tile(a, b);
        if (performance.now() > until) break;
      }
      this.draw();
    })));
  }

  // The pair (query, key) under the pointer, or null.
  at(event) {
    const box = this.canvas.getBoundingClientRect(), [i0, i1, j0, j1] = this.window;
    const x = (event.clientX - box.left - this.pad) / this.side, y = (event.clientY - box.top - this.pad) / this.side;
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
    const pair = { i: Math.floor(i0 + y * (i1 - i0)), j: Math.floor(j0 + x * (j1 - j0)) };
    return pair.i < this.head.size && pair.j < this.head.size ? pair : null;
  }

  place(element, position, from, to, vertical) {
    const size = Math.max(1, this.side / (to - from)), at = ((position - from) / (to - from)) * this.side;
    element.hidden = position === null || at + size <= 0 || at >= this.side;
    if (element.hidden) return;
    const start = Math.max(0, at), length = Math.min(size, this.side - start, size + at - start);
    Object.assign(element.style, vertical
      ? { left: `${this.pad + start}px`, top: `${this.pad}px`, width: `${length}px`, height: `${this.side}px` }
      : { left: `${this.pad}px`, top: `${this.pad + start}px`, width: `${this.side}px`, height: `${length}px` });
  }

  hairs() {
    const [i0, i1, j0, j1] = this.window, inward = state.from === "in";
    this.place(this.chosen, state.token, inward ? j0 : i0, inward ? j1 : i1, inward);
    this.place(this.rowHair, hovered?.i ?? null, i0, i1, false);
    this.place(this.columnHair, hovered?.j ?? null, j0, j1, true);
  }

  listen() {
    const { canvas, pointers } = this;
    canvas.addEventListener("pointerdown", (event) => {
      activate(this.panel.index);
      pointers.set(event.pointerId, event);
      this.moved = false;
      if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return this.hover(event);
      pointers.set(event.pointerId, event);
      const dx = event.clientX - before.clientX, dy = event.clientY - before.clientY;
      if (pointers.size === 2) return this.pinch(event, before);
      if (event.pointerType !== "mouse" && !zoomed()) return this.hover(event); // a finger scrolls the page
      if (Math.abs(dx) + Math.abs(dy) > 0) this.moved = true;
      this.pan(-dx / this.side, -dy / this.side);
    });
    const done = (event) => {
      if (!pointers.delete(event.pointerId) || this.moved || event.type !== "pointerup") return;
      const pair = this.at(event);
      if (pair) update({ token: state.from === "in" ? pair.j : pair.i });
    };
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, done);
    canvas.addEventListener("pointerleave", () => hover(null));
    canvas.addEventListener("dblclick", () => update({ zoom: DEFAULT.zoom }));
    canvas.addEventListener("wheel", (event) => {
      // The wheel belongs to the page. With Ctrl, or once the map is zoomed, it zooms instead.
      if (!this.at(event) || !(event.ctrlKey || event.metaKey || zoomed())) return;
      event.preventDefault();
      this.zoom(event, Math.exp(clamp(event.deltaY, -120, 120) * 0.004));
    }, { passive: false });
  }

  hover(event) {
    const pair = this.at(event);
    hover(pair, this.panel, event);
  }

  zoom({ clientX, clientY }, factor) {
    const box = this.canvas.getBoundingClientRect();
    zoomBy(factor, clamp((clientX - box.left - this.pad) / this.side, 0, 1), clamp((clientY - box.top - this.pad) / this.side, 0, 1));
  }

  pinch(event, before) {
    this.moved = true;
    const other = [...this.pointers.values()].find((p) => p.pointerId !== event.pointerId);
    const distance = (p) => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY);
    const middle = { clientX: (event.clientX + other.clientX) / 2, clientY: (event.clientY + other.clientY) / 2 };
    this.zoom(middle, clamp(distance(before) / Math.max(1, distance(event)), 0.5, 2));
    this.pan((before.clientX - event.clientX) / 2 / this.side, (before.clientY - event.clientY) / 2 / this.side);
  }

  pan(x, y) {
    const [top, bottom, left, right] = state.zoom, down = y * (bottom - top), across = x * (right - left);
    const dy = clamp(down, -top, 1 - bottom), dx = clamp(across, -left, 1 - right);
    if (dx || dy) update({ zoom: [top + dy, bottom + dy, left + dx, right + dx] });
  }
}

const zoomed = () => state.zoom.join() !== DEFAULT.zoom.join();

// Zoom in (factor < 1) or out around a point of the visible part.
function zoomBy(factor, x = 0.5, y = 0.5) {
  const [top, bottom, left, right] = state.zoom;
  const size = clamp((right - left) * factor, 4 / Math.max(4, headOf(state.panels[state.active]).size), 1);
  if (size > 0.999) return update({ zoom: DEFAULT.zoom }); // despite rounding, the wheel scrolls the page again
  const start = (from, to, at) => clamp(from + at * (to - from) - at * size, 0, 1 - size);
  const t = start(top, bottom, y), l = start(left, right, x);
  update({ zoom: [t, t + size, l, l + size] });
}

// Draw the visible part of a head into a square, and return the tiles that are still missing.
function drawMap(context, head, [i0, i1, j0, j1], look, { x, y, side }, exact, picture) {
  const missing = [];
  context.fillStyle = rgb(PALETTE[look.theme].paper);
  context.fillRect(x, y, side, side);
  if (picture) stretch(context, picture, j0 / head.bin, i0 / head.bin, (j1 - j0) / head.bin, (i1 - i0) / head.bin, x, y, side);
  if (!exact) return missing;
  const top = Math.floor(i0), left = Math.floor(j0), bottom = Math.min(head.size, Math.ceil(i1)), right = Math.min(head.size, Math.ceil(j1));
  const [a0, a1, b0, b1] = [top, bottom - 1, left, right - 1].map((p) => Math.floor(p / TILE));
  const exactly = sheet((b1 - b0 + 1) * TILE, (a1 - a0 + 1) * TILE, (pixels, width) => {
    for (let a = a0; a <= a1; a++)
      for (let b = b0; b <= b1; b++) {
        if (!head.hasTile(a, b)) { if (!head.causal || b <= a) missing.push([a, b]); continue; }
        const across = Math.min(TILE, head.size - b * TILE), down = Math.min(TILE, head.size - a * TILE);
        paint(head.tile(a, b), across, down, pixels, width, (b - b0) * TILE, (a - a0) * TILE, look);
      }
  });
  stretch(context, exactly, j0 - b0 * TILE, i0 - a0 * TILE, j1 - j0, i1 - i0, x, y, side);
  return missing;
}

function basePicture(head, look) {
  const { grid } = head;
  return sheet(grid, grid, (pixels) => paint(head.pooled, grid, grid, pixels, grid, 0, 0, look));
}

function sheet(width, height, fill) {
  const canvas = make("canvas", { width, height }), context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  fill(image.data, width);
  context.putImageData(image, 0, 0);
  return canvas;
}

// Scale a picture: enlarged cells stay sharp, reduced ones are averaged.
function stretch(context, picture, sx, sy, sw, sh, x, y, side) {
  context.imageSmoothingEnabled = sw > 1.2 * side;
  context.imageSmoothingQuality = "high";
  context.save();
  context.beginPath(); context.rect(x, y, side, side); context.clip();
  context.drawImage(picture, sx, sy, sw, sh, x, y, side, side);
  context.restore();
}
