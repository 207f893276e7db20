// Decode the arrays embedded in the page: base64, some of them deflated (written by pack.py).

const arrays = new Map();

function array(facts) {
  if (!arrays.has(facts.block)) arrays.set(facts.block, decode(facts));
  return arrays.get(facts.block);
}

async function decode(facts) {
  const element = document.getElementById(`block-${facts.block}`);
  let bytes = fromBase64(element.textContent);
  if ("deflated" in element.dataset) bytes = await inflated(bytes);
  element.textContent = ""; // free the memory
  const { buffer } = bytes;
  const count = facts.shape.reduce((a, b) => a * b, 1);
  if (facts.type === "f32") return new Float32Array(buffer, 0, count);
  const values = new Float32Array(count);
  if (facts.type === "i16") {
    const width = facts.shape.at(-1);
    const steps = new Float32Array(buffer, 0, width);
    const codes = new Int16Array(buffer, 4 * width, count);
    for (let i = 0; i < count; i++) values[i] = codes[i] * steps[i % width];
    return values;
  }
  const codes = facts.type === "u8" ? new Uint8Array(buffer, 0, count) : new Uint16Array(buffer, 0, count);
  const levels = facts.type === "u8" ? 255 : 65535;
  const table = new Float32Array(levels + 1);
  for (let code = 1; code <= levels; code++) table[code] = facts.largest * Math.exp((code - levels) * facts.step);
  for (let i = 0; i < count; i++) values[i] = table[codes[i]];
  return values;
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

async function inflated(bytes) {
  if (typeof DecompressionStream === "undefined") return inflate(bytes);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// RFC 1950 and 1951, for browsers older than 2023, which have no DecompressionStream.
function inflate(source) {
  let at = 2, hold = 0, held = 0, size = 0, out = new Uint8Array(4 * source.length + 1024);
  const bits = (count) => {
    while (held < count) { hold |= source[at++] << held; held += 8; }
    const value = hold & ((1 << count) - 1);
    hold >>>= count; held -= count;
    return value;
  };
  const reserve = (count) => {
    if (size + count <= out.length) return;
    const larger = new Uint8Array(2 * out.length + count);
    larger.set(out); out = larger;
  };
  // A Huffman code, read bit by bit: `counts` is the number of codes of each length, `symbols` lists their symbols in order.
  const tree = (lengths) => {
    const counts = new Uint16Array(16), next = new Uint16Array(16), symbols = new Uint16Array(lengths.length);
    for (const length of lengths) counts[length]++;
    counts[0] = 0;
    for (let i = 1; i < 15; i++) next[i + 1] = next[i] + counts[i];
    lengths.forEach((length, symbol) => { if (length) symbols[next[length]++] = symbol; });
    return { counts, symbols };
  };
  const symbol = ({ counts, symbols }) => {
    let code = 0, first = 0, index = 0;
    for (let length = 1; length < 16; length++) {
      code |= bits(1);
      const count = counts[length];
      if (code - first < count) return symbols[index + code - first];
      index += count; first = (first + count) << 1; code <<= 1;
    }
    throw new Error("damaged block");
  };
  const grow = (start, base) => {
    const extra = [], value = [];
    for (let i = 0, next = base; i < 30; i++) {
      extra[i] = i < start ? 0 : ((i - start) >> (start === 8 ? 2 : 1)) + 1;
      value[i] = next; next += 1 << extra[i];
    }
    return { extra, value };
  };
  const lengthOf = grow(8, 3), distanceOf = grow(4, 1);
  lengthOf.extra[28] = 0; lengthOf.value[28] = 258;
  const fixed = [tree([...Array(288).keys()].map((i) => (i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8))), tree(Array(30).fill(5))];
  for (let last = 0; !last;) {
    last = bits(1);
    const kind = bits(2);
    if (kind === 0) {
      hold = held = 0;
      const count = source[at] | (source[at + 1] << 8);
      at += 4; reserve(count);
      out.set(source.subarray(at, at + count), size);
      at += count; size += count;
      continue;
    }
    let [literals, distances] = fixed;
    if (kind === 2) {
      const numLiterals = bits(5) + 257, numDistances = bits(5) + 1, numCodes = bits(4) + 4;
      const order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15], codes = Array(19).fill(0);
      for (let i = 0; i < numCodes; i++) codes[order[i]] = bits(3);
      const meta = tree(codes), lengths = [];
      while (lengths.length < numLiterals + numDistances) {
        const code = symbol(meta);
        if (code < 16) { lengths.push(code); continue; }
        const value = code === 16 ? lengths.at(-1) : 0;
        const repeat = code === 16 ? 3 + bits(2) : code === 17 ? 3 + bits(3) : 11 + bits(7);
        for (let i = 0; i < repeat; i++) lengths.push(value);
      }
      literals = tree(lengths.slice(0, numLiterals)); distances = tree(lengths.slice(numLiterals));
    }
    for (let code = symbol(literals); code !== 256; code = symbol(literals)) {
      reserve(258);
      if (code < 256) { out[size++] = code; continue; }
      const length = lengthOf.value[code - 257] + bits(lengthOf.extra[code - 257]);
      const which = symbol(distances), distance = distanceOf.value[which] + bits(distanceOf.extra[which]);
      for (let i = 0; i < length; i++, size++) out[size] = out[size - distance];
    }
  }
  return out.slice(0, size);
}
