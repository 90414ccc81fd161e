// The options of decoding: fields, and the parameters that they ask for. The server checks them, not the page.

import { byId, element } from "./dom.js";

const ANSWERS = ["num_return_sequences", "Answers"];
const FIELDS = {
  greedy: [],
  beams: [["num_beams", "Beams"], ANSWERS, ["length_penalty", "Length penalty"]],
  sampling: [["temperature", "Temperature"], ["top_k", "Top k"], ["top_p", "Top p"], ["seed", "Seed"], ANSWERS],
};
const MORE = [
  ["prefix", "The answer begins with", "wide"],
  ["max_new_tokens", "Most tokens"],
  ["min_new_tokens", "Least tokens"],
  ["repetition_penalty", "Repetition penalty"],
  ["no_repeat_ngram_size", "No n-gram twice"],
  ["stop_strings", "Stop at the text", "wide"],
];
const TEXTS = ["prefix", "stop_strings"];
const HINTS = {
  greedy: "Takes the most probable token each time, and streams.",
  beams: "Keeps several candidates and gives the best, at the end.",
  sampling: "Draws each token; the same seed draws the same again.",
};
// What the server decodes with where neither the request nor the bundle says.
const DEFAULTS = {
  num_beams: 1, num_return_sequences: 1, length_penalty: 1, do_sample: false, temperature: 1, top_k: 50, top_p: 1,
  seed: 0, repetition_penalty: 1, no_repeat_ngram_size: 0, min_new_tokens: 0,
};
const START = { num_beams: 4 };

const entered = new Map();
let defaults = DEFAULTS;

export const strategy = () => document.querySelector("input[name=strategy]:checked").value;

/** Show the fields for the strategy that is chosen. */
export function showFields() {
  byId("strategy-hint").textContent = HINTS[strategy()];
  byId("options").replaceChildren(...FIELDS[strategy()].map(field));
}

/** Take up what a model decodes with unless told otherwise. */
export function setDefaults(given, limit) {
  defaults = { ...DEFAULTS, ...given };
  const usual = defaults.do_sample ? "sampling" : defaults.num_beams > 1 ? "beams" : "greedy";
  document.querySelector(`input[name=strategy][value=${usual}]`).checked = true;
  entered.clear();
  defaults.max_new_tokens ??= `${limit}, its limit`;
  byId("more-options").replaceChildren(...MORE.map(field));
  showFields();
}

/** Return the parameters of the request: what differs from what the model does by itself. */
export function parameters() {
  const chosen = strategy();
  const names = [...FIELDS[chosen], ...MORE].map(([name]) => name);
  const asked = { do_sample: chosen === "sampling" };
  if (chosen !== "beams") asked.num_beams = 1;
  for (const name of names) {
    const text = entered.get(name) ?? "";
    const start = chosen === "beams" && defaults[name] === DEFAULTS[name] ? START[name] : undefined;
    if (text !== "") asked[name] = TEXTS.includes(name) ? text : numberOr(text);
    else if (start !== undefined) asked[name] = start;
  }
  if (!names.includes(ANSWERS[0])) asked[ANSWERS[0]] = 1;
  return Object.fromEntries(Object.entries(asked).filter(([name, value]) => value !== defaults[name]));
}

/** Say whether parameters allow a stream: one answer without beams. */
export function canStream(given) {
  const { num_beams, num_return_sequences, replace_unknowns } = { ...defaults, ...given };
  return num_beams === 1 && num_return_sequences === 1 && !replace_unknowns;
}

// What is no number is sent as it is, and the server says what it expects.
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
