// A bundle of tfexport in ONNX Runtime, in node and in a browser alike: texts in, texts out, decoded greedily.

// Files of each variant of the decoder; the first that a bundle has is taken.
const VARIANTS = [
  ["encoder_contrib.onnx", "decoder_contrib.onnx"],
  ["encoder.onnx", "decoder.onnx"],
];
const PARTS = ["tokenizer.json", "target_tokenizer.json", "weights.safetensors"];
// A token of this name is the first of those that split texts and that the model has no id for.
const BEYOND = " beyond the model's vocabulary";

/** What of a bundle is loaded, by its manifest; throws where the bundle needs more than this program does. */
export function neededFiles({ format_version, kind, files }) {
  const variant = VARIANTS.find((names) => names.every((name) => name in files));
  const refused =
    format_version !== 1 ? "has a format that is not 1"
    : kind !== "encoder-decoder" ? "is encoder-only and generates no text"
    : !("tokenizer.json" in files) ? "has no tokenizer; export it from a model directory with a tokenizer.json"
    : "generation.json" in files ? "has defaults in generation.json, which greedy decoding does not follow"
    : "shortlist.bin" in files ? "has shortlists, which this program does not apply; export it without --shortlist"
    : !variant ? "has no decoder in the contrib or the concat variant; export it with --variants concat,contrib"
    : null;
  if (refused) throw new Error(`the bundle ${refused}`);
  return [...variant, ...PARTS.filter((name) => name in files)];
}

/** Load a bundle. `read(name)` gives the bytes of a file as a Uint8Array, `ort` is onnxruntime-node or onnxruntime-web. */
export async function load(read, ort, Tokenizer, options = {}) {
  const manifest = JSON.parse(new TextDecoder().decode(await read("manifest.json")));
  const names = neededFiles(manifest);
  const [encoder, decoder, ...parts] = await Promise.all(names.map((name) => checked(read, name, manifest.files[name])));
  const [source, ...rest] = parts;
  const weights = rest.pop();
  const externalData = [{ path: "weights.safetensors", data: weights }];
  const open = (graph) => ort.InferenceSession.create(graph, { ...options, externalData });
  const { pad, start, eos, unk } = manifest.spec.tokens;
  const around = [pad, ...manifest.text.source_prefix, ...manifest.text.source_suffix];
  // Where the target has ids of its own, its start and end are ordinary words of the source.
  const vocabularies = [
    new Vocabulary(source, Tokenizer, unk, rest.length ? around : [start, eos, ...around]),
    new Vocabulary(rest[0] ?? source, Tokenizer, unk, [pad, start, eos]),
  ];
  return new Model(manifest, await open(encoder), await open(decoder), vocabularies, ort.Tensor);
}

async function checked(read, name, { sha256 }) {
  const bytes = await read(name);
  const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  const hex = Array.from(sum, (byte) => byte.toString(16).padStart(2, "0")).join("");
  if (hex !== sha256) throw new Error(`${name} is not the file that the manifest names; copy the bundle again`);
  return bytes;
}

/** One tokenizer.json. Text never becomes a special token: it is read as its characters, or as unknown. */
export class Vocabulary {
  constructor(bytes, Tokenizer, unknown, special) {
    const data = JSON.parse(new TextDecoder().decode(bytes));
    const marked = data.added_tokens.filter((token) => token.special);
    const plain = data.added_tokens.filter((token) => !token.special);
    const config = { unk_token: data.model.unk_token, clean_up_tokenization_spaces: false };
    this.decoder = new Tokenizer(data, config);
    this.encoder = new Tokenizer({ ...data, added_tokens: plain }, config);
    for (const { content, id } of marked) this.encoder.model.tokens_to_ids.set(content, id);
    this.unknown = this.encoder.token_to_id(data.model.unk_token) ?? data.model.unk_id ?? unknown;
    this.special = new Set([...special, ...marked.map((token) => token.id)]);
    this.special.delete(this.unknown);
    this.beyond = this.encoder.token_to_id(BEYOND) ?? Infinity;
  }

  encode(text) {
    if (!text.trim()) throw new Error("a text is empty; leave it out");
    const own = this.encoder.encode(text, { add_special_tokens: false }).ids;
    const ids = this.encoder.encode(text).ids;
    const first = ids.findIndex((_, i) => own.every((id, k) => ids[i + k] === id));
    const said = own.map((id) => (this.special.has(id) || id >= this.beyond ? this.unknown : id));
    if (said.every((id) => id === this.unknown)) throw new Error(`the vocabulary knows no character of: ${text}`);
    return [...ids.slice(0, first), ...said, ...ids.slice(first + own.length)];
  }

  decode(ids) {
    const shown = ids.filter((id) => !this.special.has(id));
    return shown.length ? this.decoder.decode(shown, { skip_special_tokens: true }) : "";
  }
}

export class Model {
  constructor(manifest, encoder, decoder, [source, target], Tensor) {
    Object.assign(this, { manifest, encoder, decoder, source, target, Tensor });
  }

  /** Answer each text with its `text`, its `token_ids` and why it ended, "eos" or "length". */
  async generate(texts, batchSize = 32) {
    const { text, spec } = this.manifest;
    const sources = texts.map((one) => [...text.source_prefix, ...this.source.encode(one), ...text.source_suffix]);
    const long = sources.findIndex((ids) => ids.length > spec.max_source_length);
    if (long >= 0) throw new Error(`text ${long + 1} has ${sources[long].length} tokens, the limit is ${spec.max_source_length}`);
    const results = [];
    for (let first = 0; first < sources.length; first += batchSize) {
      for (const ids of await this.#decode(sources.slice(first, first + batchSize))) {
        const finish_reason = ids.at(-1) === spec.tokens.eos ? "eos" : "length";
        results.push({ text: this.target.decode(ids), token_ids: ids, finish_reason });
      }
    }
    return results;
  }

  /** Decode a batch of sources. The inputs of both variants are made; the graph is given those that it has. */
  async #decode(sources) {
    const { tokens, max_target_length: capacity } = this.manifest.spec;
    const { target_prefix } = this.manifest.text;
    const [rows, length] = [sources.length, Math.max(...sources.map((ids) => ids.length))];
    const int64 = (values, dims) => new this.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
    const int32 = (values, dims) => new this.Tensor("int32", Int32Array.from(values), dims);
    const each = (value) => Array(rows).fill(value);

    const padded = sources.map((ids) => [...ids, ...Array(length - ids.length).fill(tokens.pad)]);
    const mask = sources.flatMap((ids) => padded[0].map((_, i) => i < ids.length));
    const source_mask = new this.Tensor("bool", mask, [rows, length]);
    const cross = await this.encoder.run({ source_ids: int64(padded.flat(), [rows, length]), source_mask });
    const feeds = { ...cross, source_mask, num_candidates: int64([1], [1]) };
    // Caches grow with each step, or are as long as the longest target from the beginning.
    const isFixed = this.decoder.inputNames.includes("positions");
    for (const [name, { type, data, dims }] of Object.entries(cross)) {
      const shape = [rows, dims[1], isFixed ? capacity : 0, dims[3]];
      const zeros = new data.constructor(shape.reduce((product, size) => product * size));
      feeds[name.replace("cross_", "past_")] = new this.Tensor(type, zeros, shape);
    }

    const fetches = this.decoder.outputNames.filter((name) => /^(candidate_ids$|present_)/.test(name));
    const isDone = ({ length }, row) => length >= capacity || ended[row];
    const written = sources.map(() => [...target_prefix]);
    const ended = each(false);
    let next = each([tokens.start, ...target_prefix]);
    for (let past = 0, total; !written.every(isDone); past = total) {
      const shape = [rows, next[0].length];
      total = past + shape[1];
      feeds.target_ids = int64(next.flat(), shape);
      feeds.positions = int64(next.flatMap((ids) => ids.map((_, i) => past + i)), shape);
      feeds.last_position = int32(each(total - 1), [rows]);
      feeds.total_length = int32([total], [1]);
      const inputs = Object.fromEntries(this.decoder.inputNames.map((name) => [name, feeds[name]]));
      const outputs = await this.decoder.run(inputs, fetches);
      next = Array.from(outputs.candidate_ids.data, (id) => [Number(id)]);
      next.forEach(([id], row) => {
        if (!isDone(written[row], row)) written[row].push(id);
        ended[row] ||= id === tokens.eos;
      });
      for (const name of fetches) feeds[name.replace("present_", "past_")] = outputs[name];
    }
    return written;
  }
}
