// Full scores of a response (attn_capture_data): base64 of gzip of float16 [T, H, T].

// Half precision as numbers, once: 65,536 of them.
let halves = null;

function halfTable() {
  const table = new Float32Array(65_536);
  for (let bits = 0; bits < 65_536; bits += 1) {
    const [exponent, fraction, sign] = [(bits >> 10) & 31, bits & 1023, bits & 32_768 ? -1 : 1];
    table[bits] = sign * (exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity) : (1 + fraction / 1024) * 2 ** (exponent - 15));
  }
  return table;
}

/**
 * @param {{data: string, shape: number[]}} element of attn_capture_data
 * @returns {Promise<{tokens: number, heads: number, row: (query: number, head: number | null) => Float64Array}>}
 *   row: probabilities of the keys up to the query; the mean of the heads where head is null
 * @throws {Error} if the data are not of the shape that it names
 */
export async function decodeScores({ data, shape }) {
  const [tokens, heads] = shape;
  const packed = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  if (bytes.byteLength !== 2 * tokens * heads * tokens) throw new Error("The scores have another size than their shape.");
  const bits = new Uint16Array(bytes);
  halves ??= halfTable();
  const row = (query, head) => {
    const found = new Float64Array(query + 1);
    for (let h = head ?? 0; h < (head === null ? heads : head + 1); h += 1) {
      const start = (query * heads + h) * tokens;
      for (let key = 0; key <= query; key += 1) found[key] += halves[bits[start + key]];
    }
    if (head === null) for (let key = 0; key <= query; key += 1) found[key] /= heads;
    return found;
  };
  return { tokens, heads, row };
}
