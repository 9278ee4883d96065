// The embedded model in plain JavaScript: a byte-level BPE tokenizer, and the forward pass of a Llama over a paged cache.
//
// It computes in float32 with the weights of `vllm/models/tiny-python`, in the order of `minivllm`'s model: a test holds the
// tokens of both equal. One token takes some four million multiplications.

export class Tokenizer {
  constructor({ model: { vocab, merges } }) {
    this.ids = new Map(Object.entries(vocab));
    this.pieces = [];
    for (const [piece, id] of Object.entries(vocab)) this.pieces[id] = piece; // whose order is not the ids': digits come first
    this.ranks = new Map(merges.map((pair, rank) => [pair.join(" "), rank]));
    const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    let shifted = 256; // the other bytes are written as characters from here on
    this.characters = Array.from({ length: 256 }, (_, byte) => String.fromCodePoint(printable(byte) ? byte : shifted++));
    this.bytes = new Map(this.characters.map((character, byte) => [character, byte]));
  }

  encode(text) {
    const words = text.match(/'(?:s|t|re|ve|m|ll|d)|[0-9]| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?!\S)|\s+/gu) ?? [];
    return words.flatMap((word) => this.merge([...new TextEncoder().encode(word)].map((byte) => this.characters[byte])));
  }

  // Merge the pair that was learnt first, until no pair is left.
  merge(parts) {
    for (;;) {
      const ranks = parts.slice(1).map((part, index) => this.ranks.get(`${parts[index]} ${part}`) ?? Infinity);
      const best = Math.min(Infinity, ...ranks);
      if (best === Infinity) return parts.map((part) => this.ids.get(part));
      const at = ranks.indexOf(best);
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  // The text of tokens, the end of a text left out.
  decode(ids) {
    const bytes = ids.filter((id) => id > 0).flatMap((id) => [...this.pieces[id]].map((character) => this.bytes.get(character)));
    return new TextDecoder().decode(new Uint8Array(bytes));
  }
}

export class Llama {
  constructor(config, checkpoint, numSlots) {
    Object.assign(this, { config, weights: tensorsOf(checkpoint) });
    const { num_hidden_layers: layers, num_key_value_heads: heads, head_dim: dim } = config;
    this.caches = Array.from({ length: layers }, () => ({ keys: new Float32Array(numSlots * heads * dim), values: new Float32Array(numSlots * heads * dim) }));
    this.frequencies = Float32Array.from({ length: dim / 2 }, (_, index) => config.rope_theta ** ((-2 * index) / dim));
  }

  // Returns the most probable next token after the last token of each request. The batch is flat: `tokens` and `positions` of
  // all requests one after another, `counts` tokens for each request, and `blocks`, its block table.
  forward({ tokens, positions, counts, blocks, block_size: blockSize }) {
    const next = [];
    let index = 0;
    counts.forEach((count, request) => {
      const slots = blocks[request].flatMap((block) => Array.from({ length: blockSize }, (_, offset) => block * blockSize + offset));
      let hidden;
      for (const end = index + count; index < end; index += 1) hidden = this.token(tokens[index], positions[index], slots);
      next.push(this.greatestLogit(hidden));
    });
    return next;
  }

  // One token through all layers. Its key and value go to slot `slots[position]`; it attends to the slots up to that one.
  token(id, position, slots) {
    const { hidden_size: width, num_hidden_layers: layers, rms_norm_eps: epsilon } = this.config;
    const weight = (name) => this.weights.get(name);
    const hidden = weight("model.embed_tokens.weight").slice(id * width, (id + 1) * width);
    for (let layer = 0; layer < layers; layer += 1) {
      const of = (name) => weight(`model.layers.${layer}.${name}.weight`);
      const normed = rmsNorm(hidden, of("input_layernorm"), epsilon);
      const query = this.rotate(matvec(of("self_attn.q_proj"), normed), position);
      const key = this.rotate(matvec(of("self_attn.k_proj"), normed), position);
      const { keys, values } = this.caches[layer];
      keys.set(key, slots[position] * key.length);
      values.set(matvec(of("self_attn.v_proj"), normed), slots[position] * key.length);
      add(hidden, matvec(of("self_attn.o_proj"), this.attention(query, keys, values, slots, position + 1)));
      const mlp = rmsNorm(hidden, of("post_attention_layernorm"), epsilon);
      const gate = matvec(of("mlp.gate_proj"), mlp), up = matvec(of("mlp.up_proj"), mlp);
      for (let i = 0; i < gate.length; i += 1) gate[i] = (gate[i] / (1 + Math.exp(-gate[i]))) * up[i];
      add(hidden, matvec(of("mlp.down_proj"), gate));
    }
    return rmsNorm(hidden, weight("model.norm.weight"), epsilon);
  }

  // Rotary position embedding: the first half of each head is paired with its second half.
  rotate(heads, position) {
    const dim = this.config.head_dim, half = dim / 2;
    for (let start = 0; start < heads.length; start += dim)
      for (let i = 0; i < half; i += 1) {
        const angle = position * this.frequencies[i], cos = Math.cos(angle), sin = Math.sin(angle);
        const first = heads[start + i], second = heads[start + half + i];
        heads[start + i] = first * cos - second * sin;
        heads[start + half + i] = second * cos + first * sin;
      }
    return heads;
  }

  // Attention of one query over a request's first `length` slots; several query heads read one head of keys.
  attention(query, keys, values, slots, length) {
    const { num_attention_heads: heads, num_key_value_heads: kvHeads, head_dim: dim } = this.config;
    const out = new Float32Array(query.length), scores = new Float32Array(length);
    for (let head = 0; head < heads; head += 1) {
      const kvHead = Math.floor(head / (heads / kvHeads));
      const place = (at) => (slots[at] * kvHeads + kvHead) * dim;
      let most = -Infinity, total = 0;
      for (let at = 0; at < length; at += 1) {
        let score = 0;
        for (let i = 0, from = place(at); i < dim; i += 1) score += query[head * dim + i] * keys[from + i];
        scores[at] = score / Math.sqrt(dim);
        most = Math.max(most, scores[at]);
      }
      for (let at = 0; at < length; at += 1) total += scores[at] = Math.exp(scores[at] - most);
      for (let at = 0; at < length; at += 1)
        for (let i = 0, from = place(at); i < dim; i += 1) out[head * dim + i] += (scores[at] / total) * values[from + i];
    }
    return out;
  }

  greatestLogit(hidden) {
    const logits = matvec(this.weights.get("model.embed_tokens.weight"), hidden); // the head shares the embedding's weights
    return logits.reduce((best, logit, id) => (logit > logits[best] ? id : best), 0);
  }
}

// A safetensors file's tensors by name, bf16 widened to float32: a bf16 number is the upper half of a float32.
function tensorsOf(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  delete header.__metadata__;
  return new Map(Object.entries(header).map(([name, { data_offsets: [start, end] }]) => {
    const halves = new Uint16Array(buffer.slice(8 + length + start, 8 + length + end));
    return [name, new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer)];
  }));
}

// `weight` is [rows, vector.length].
function matvec(weight, vector) {
  const columns = vector.length, out = new Float32Array(weight.length / columns);
  for (let row = 0, at = 0; row < out.length; row += 1) {
    let sum = 0;
    for (let column = 0; column < columns; column += 1, at += 1) sum += weight[at] * vector[column];
    out[row] = sum;
  }
  return out;
}

function rmsNorm(vector, weight, epsilon) {
  const scale = 1 / Math.sqrt(vector.reduce((sum, number) => sum + number * number, 0) / vector.length + epsilon);
  return vector.map((number, index) => number * scale * weight[index]);
}

function add(vector, other) {
  for (let i = 0; i < vector.length; i += 1) vector[i] += other[i];
}
