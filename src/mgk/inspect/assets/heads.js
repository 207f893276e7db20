// Compute the weights of a head from its queries and keys, with the formula of mgk/inspect/heads.py.

const TILE = 128;
const TILES_KEPT = 640; // in memory, for all heads: 84 MB with two components

class Head {
  constructor(facts, model, layer, index) {
    Object.assign(this, facts, { model, layer, index });
    this.tiles = new Map();
  }

  get ready() { return this.loaded === true; }

  async loadBase() {
    if (this.pooled) return;
    const [M, G] = this.base.shape;
    const all = await array(this.base);
    this.grid = G;
    this.pooled = Array.from({ length: M }, (_, r) => all.subarray(r * G * G, (r + 1) * G * G));
    this.basePeak = typicalPeak(this.pooled, G);
  }

  async load() {
    if (this.loading) return this.loading;
    this.loading = (async () => {
      await this.loadBase();
      const names = this.weights ? ["weights"] : ["query", "key", "row", "column", "total"];
      for (const name of names) this[`_${name}`] = await array(this[name]);
      this.loaded = true;
    })();
    return this.loading;
  }

  // Contribution of each component to A[i0..i1, j0..j1]: one array per component, row by row.
  block(i0, i1, j0, j1) {
    const M = this.components, width = j1 - j0, N = this.size;
    const out = Array.from({ length: M }, () => new Float32Array((i1 - i0) * width));
    if (this.weights) {
      for (let r = 0; r < M; r++)
        for (let i = i0; i < i1; i++)
          out[r].set(this._weights.subarray((r * N + i) * N + j0, (r * N + i) * N + j1), (i - i0) * width);
      return out;
    }
    const { _query: query, _key: key, _row: row, _column: column, _total: total, scale, hard } = this;
    const F = this.query.shape[1], shared = this.key.shape[0] === 1, x = new Float64Array(M);
    for (let i = i0; i < i1; i++) {
      if (total[i] < -1e38) continue; // no visible key
      const end = this.causal ? Math.min(j1, i + 1) : j1;
      for (let j = this.window ? Math.max(j0, i + 1 - this.window) : j0; j < end; j++) {
        let best = 0, product = 0;
        for (let r = 0; r < M; r++) {
          if (r === 0 || !shared) {
            product = 0;
            for (let f = 0, a = i * F, b = ((shared ? 0 : r) * N + j) * F; f < F; f++) product += query[a + f] * key[b + f];
          }
          const score = scale[r] * product;
          x[r] = (this.log ? Math.log(score) : score) + row[i * M + r] + column[r * N + j] - total[i];
          if (x[r] > x[best]) best = r;
        }
        const place = (i - i0) * width + j - j0;
        if (hard) out[best][place] = Math.exp(x[best]);
        else for (let r = 0; r < M; r++) out[r][place] = Math.exp(x[r]);
      }
    }
    return out;
  }

  rowOf(i) { return this.block(i, i + 1, 0, this.size); }
  columnOf(j) { return this.block(0, this.size, j, j + 1); }

  // Weight, contributions and responsibilities of one pair. Responsibilities are soft (Eqn 11), also for a hard E-step.
  pair(i, j) {
    const parts = this.block(i, i + 1, j, j + 1).map((values) => values[0]);
    const weight = parts.reduce((a, b) => a + b, 0);
    let shares = parts;
    if (this.hard && weight) {
      const soft = Object.create(this, { hard: { value: false } });
      shares = soft.block(i, i + 1, j, j + 1).map((values) => values[0]);
    }
    const all = shares.reduce((a, b) => a + b, 0);
    return { weight, parts, responsibilities: shares.map((part) => (all ? part / all : 0)) };
  }

  tile(a, b) {
    const name = a * 65536 + b;
    let found = this.tiles.get(name);
    if (!found) {
      const end = (t) => Math.min(this.size, (t + 1) * TILE);
      found = this.block(a * TILE, end(a), b * TILE, end(b));
      this.tiles.set(name, found);
      recent.push([this, name]);
      while (recent.length > TILES_KEPT) { const [head, old] = recent.shift(); head.tiles.delete(old); }
    }
    return found;
  }

  hasTile(a, b) { return this.tiles.has(a * 65536 + b); }
}

const recent = [];

// The 75% quantile of the row maxima, where the colour scale ends.
function typicalPeak(parts, size) {
  const peaks = new Float32Array(size);
  for (let i = 0; i < size; i++)
    for (let j = 0; j < size; j++) {
      let value = 0;
      for (const part of parts) value += part[i * size + j];
      if (value > peaks[i]) peaks[i] = value;
    }
  peaks.sort();
  return peaks[Math.floor(0.75 * (size - 1))] || 1e-30;
}

const DATA = JSON.parse(document.getElementById("data").textContent);
const MODELS = DATA.models.map((model, m) => ({
  ...model,
  longestToken: model.tokens.reduce((most, token) => Math.max(most, [...token.trim()].length), 0),
  layers: model.layers.map((layer, l) => ({ ...layer, heads: layer.heads.map((head, h) => new Head(head, m, l, h)) })),
}));

// The values that a view shows: of one component, or the sum of all.
function valuesOf(values, view) {
  if (view.startsWith("c")) return values[Math.min(values.length, Number(view.slice(1))) - 1];
  if (values.length === 1) return values[0];
  const sum = Float32Array.from(values[0]);
  for (let r = 1; r < values.length; r++) for (let i = 0; i < sum.length; i++) sum[i] += values[r][i];
  return sum;
}

function entropy(row) {
  let sum = 0;
  for (const p of row) if (p > 0) sum -= p * Math.log(p);
  return sum;
}
