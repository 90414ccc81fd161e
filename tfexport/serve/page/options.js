// Decoding options: input fields and the parameters of the request. The server checks the values.

import { byId, element } from "./dom.js";

const OUTPUTS = ["num_return_sequences", "Outputs"];
const FIELDS = {
  greedy: [],
  beams: [["num_beams", "Beams"], OUTPUTS, ["length_penalty", "Length penalty"]],
  sampling: [["temperature", "Temperature"], ["top_k", "Top k"], ["top_p", "Top p"], ["seed", "Seed"], OUTPUTS],
};
const MORE = [
  ["prefix", "Output prefix", "wide"],
  ["max_new_tokens", "Max new tokens"],
  ["min_new_tokens", "Min new tokens"],
  ["repetition_penalty", "Repetition penalty"],
  ["no_repeat_ngram_size", "No-repeat n-gram size"],
  ["stop_strings", "Stop text", "wide"],
];
const TEXTS = ["prefix", "stop_strings"];
const HINTS = {
  greedy: "Selects the most probable token in each step; the output is streamed.",
  beams: "Compares several candidates; the best are shown at the end.",
  sampling: "Draws each token at random; the same seed gives the same output.",
};
// Values that the server uses if neither the request nor the bundle sets them.
const DEFAULTS = {
  num_beams: 1, num_return_sequences: 1, length_penalty: 1, do_sample: false, temperature: 1, top_k: 50, top_p: 1,
  seed: 0, repetition_penalty: 1, no_repeat_ngram_size: 0, min_new_tokens: 0,
};
const START = { num_beams: 4 };

const entered = new Map();
let defaults = DEFAULTS;

export const strategy = () => document.querySelector("input[name=strategy]:checked").value;

/** Show the fields of the selected strategy. */
export function showFields() {
  byId("strategy-hint").textContent = HINTS[strategy()];
  byId("options").replaceChildren(...FIELDS[strategy()].map(field));
}

/** Reset the fields to the defaults of a model. */
export function setDefaults(given, limit) {
  defaults = { ...DEFAULTS, ...given };
  const usual = defaults.do_sample ? "sampling" : defaults.num_beams > 1 ? "beams" : "greedy";
  document.querySelector(`input[name=strategy][value=${usual}]`).checked = true;
  entered.clear();
  defaults.max_new_tokens ??= `${limit} (limit)`;
  byId("more-options").replaceChildren(...MORE.map(field));
  showFields();
}

/** Return the parameters that differ from the model's defaults. */
export function parameters() {
  const chosen = strategy();
  const names = [...FIELDS[chosen], ...MORE].map(([name]) => name);
  const values = { do_sample: chosen === "sampling" };
  if (chosen !== "beams") values.num_beams = 1;
  for (const name of names) {
    const text = entered.get(name) ?? "";
    const start = chosen === "beams" && defaults[name] === DEFAULTS[name] ? START[name] : undefined;
    if (text !== "") values[name] = TEXTS.includes(name) ? text : numberOr(text);
    else if (start !== undefined) values[name] = start;
  }
  if (!names.includes(OUTPUTS[0])) values[OUTPUTS[0]] = 1;
  return Object.fromEntries(Object.entries(values).filter(([name, value]) => value !== defaults[name]));
}

/** Return whether the output can be streamed: a single one, without beams. */
export function canStream(given) {
  const { num_beams, num_return_sequences, replace_unknowns } = { ...defaults, ...given };
  return num_beams === 1 && num_return_sequences === 1 && !replace_unknowns;
}

// Other text is sent unchanged, and the server reports what it expects.
function numberOr(text) {
  const number = Number(text.replace(",", "."));
  return Number.isFinite(number) ? number : text;
}

function field([name, label, kind = ""]) {
  const usual = defaults[name] ?? "";
  const start = strategy() === "beams" && usual === DEFAULTS[name] ? START[name] ?? usual : usual;
  const input = element("input", {
    name,
    type: "text",
    inputmode: TEXTS.includes(name) ? "text" : "decimal",
    placeholder: TEXTS.includes(name) ? "" : start,
    spellcheck: "false",
    dir: "auto",
    oninput: () => entered.set(name, input.value.trim() === "" ? "" : input.value),
  });
  input.value = entered.get(name) ?? "";
  return element("label", { class: kind }, label, input);
}
