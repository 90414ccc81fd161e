// Reads a date in the visitor's browser: loads the bundle beside this page and answers what is written, as it is written.

import { load } from "./bundle.mjs";
import * as ort from "./ort.wasm.bundle.min.mjs";
import { Tokenizer } from "./tokenizers.min.mjs";

const place = Object.fromEntries(["text", "answer", "said", "state"].map((id) => [id, document.getElementById(id)]));

async function read(name) {
  const response = await fetch(new URL(`bundle/${name}`, import.meta.url));
  if (!response.ok) throw new Error(`${name} cannot be had: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

function tell(state, isFailure = false) {
  place.state.textContent = state;
  place.state.toggleAttribute("data-failed", isFailure);
}

function show(answer, said = "") {
  place.answer.value = answer;
  place.said.textContent = said;
}

/** A date in the visitor's own words; nothing where the answer is none. */
function inWords(iso) {
  const date = new Date(`${iso}T12:00:00`);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleDateString(undefined, { dateStyle: "full" });
}

async function answer(model, text) {
  if (!text.trim()) return show("");
  try {
    const start = performance.now();
    const [result] = await model.generate([text]);
    const took = performance.now() - start;
    show(result.text, inWords(result.text));
    tell(`${result.token_ids.length} tokens in ${took.toFixed(0)} ms`);
  } catch (error) {
    show("");
    tell(error.message, true);
  }
}

async function main() {
  const model = await load(read, ort, Tokenizer);
  const weights = model.manifest.files["weights.safetensors"].bytes;
  tell(`Ready: ${(weights / 1e6).toFixed(1)} MB of weights, ${ort.env.wasm.numThreads} thread${ort.env.wasm.numThreads > 1 ? "s" : ""}`);
  let isBusy = false;
  // What is written while an answer is on its way is answered next.
  const follow = async () => {
    for (let text; !isBusy && text !== place.text.value; isBusy = false) {
      isBusy = true;
      text = place.text.value;
      await answer(model, text);
    }
  };
  place.text.addEventListener("input", follow);
  place.text.disabled = false;
  for (const button of document.querySelectorAll("#examples button")) {
    button.disabled = false;
    button.addEventListener("click", () => {
      place.text.value = button.textContent;
      follow();
    });
  }
  place.text.focus();
}

main().catch((error) => tell(error.message, true));
