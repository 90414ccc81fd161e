// Answer texts with a bundle of tfexport: node generate.mjs BUNDLE [TEXT…]; without TEXT, each line of standard input.

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { text as readAll } from "node:stream/consumers";
import { parseArgs } from "node:util";

import { Tokenizer } from "@huggingface/tokenizers";
import ort from "onnxruntime-node";

import { load } from "./bundle.mjs";

const USAGE = "usage: node generate.mjs BUNDLE [--json] [--time] [--batch-size 32] [--threads 1] [TEXT…]";
const options = {
  json: { type: "boolean", default: false }, // one object a line: text, token_ids, finish_reason
  time: { type: "boolean", default: false }, // say on standard error how long decoding took
  "batch-size": { type: "string", default: "32" },
  threads: { type: "string", default: "1" }, // more are faster where a step reads many megabytes of weights
};

async function main() {
  const { values, positionals } = parseArgs({ options, allowPositionals: true });
  const [bundle, ...given] = positionals;
  const [batchSize, threads] = [Number(values["batch-size"]), Number(values.threads)];
  if (!bundle || !(batchSize >= 1) || !(threads >= 1)) throw new Error(USAGE);
  const texts = given.length ? given : (await readAll(process.stdin)).replace(/\r?\n$/, "").split(/\r?\n/);
  const model = await load((name) => readFile(join(bundle, name)), ort, Tokenizer, { intraOpNumThreads: threads });
  const start = performance.now();
  const results = await model.generate(texts, batchSize);
  const seconds = (performance.now() - start) / 1000;
  for (const result of results) console.log(values.json ? JSON.stringify(result) : result.text.replaceAll("\n", " "));
  const tokens = results.reduce((sum, { token_ids }) => sum + token_ids.length, 0);
  if (values.time) console.error(`${texts.length} texts, ${tokens} tokens, ${seconds.toFixed(3)} s`);
}

main().catch((error) => {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
});
