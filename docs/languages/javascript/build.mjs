// Puts the page, what it needs from npm and a bundle into one folder, for any server of files: node build.mjs BUNDLE OUTPUT

import { copyFile, mkdir, readdir, readFile } from "node:fs/promises";
import { basename, dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

import { neededFiles } from "./bundle.mjs";

const HERE = dirname(fileURLToPath(import.meta.url));
const VENDORED = [
  "onnxruntime-web/dist/ort.wasm.bundle.min.mjs",
  "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm",
  "@huggingface/tokenizers/dist/tokenizers.min.mjs",
];

async function main(bundle, output) {
  if (!output) throw new Error("usage: node build.mjs BUNDLE OUTPUT");
  const needed = neededFiles(JSON.parse(await readFile(join(bundle, "manifest.json"), "utf8")));
  const page = await readdir(join(HERE, "page"));
  await mkdir(join(output, "bundle"), { recursive: true });
  for (const file of [...page.map((name) => join("page", name)), "bundle.mjs"]) {
    await copyFile(join(HERE, file), join(output, basename(file)));
  }
  for (const file of VENDORED) await copyFile(join(HERE, "node_modules", file), join(output, basename(file)));
  for (const name of ["manifest.json", ...needed]) await copyFile(join(bundle, name), join(output, "bundle", name));
}

main(...process.argv.slice(2)).catch((error) => {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
});
