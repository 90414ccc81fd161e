// Show outputs with their scores as bars, and tokens.

import { element, visible } from "./dom.js";

const REASONS = { eos: "Complete", length: "Cut off at the limit", stop: "Ended at the stop text", time: "Time limit exceeded" };

const score = (value) => value.toFixed(3).replace(/^-0\.0+$/, "0.000").replace("-", "−");
export const reason = (given) => REASONS[given] ?? given ?? "";

/** Show outputs, best first; a click calls `choose` with the number of the output. */
export function showAnswers(panel, answers, chosen, choose) {
  if (answers.length === 0) {
    panel.replaceChildren(element("p", { class: "hint" }, "Use beam search or sampling to generate several outputs."));
    return;
  }
  const best = Math.max(...answers.map((answer) => answer.score));
  const items = answers.map((answer, index) => {
    const bar = element("i");
    bar.style.width = `${Math.max(1, 100 * Math.exp(answer.score - best))}%`;
    return element(
      "li",
      {},
      element(
        "button",
        { type: "button", "aria-pressed": String(index === chosen), onclick: () => choose(index) },
        element("span", { class: "output", dir: "auto" }, answer.text || "(empty)"),
        element("span", { class: "score", title: reason(answer.reason) }, score(answer.score)),
        element("span", { class: "bar", "aria-hidden": "true" }, bar),
      ),
    );
  });
  const hint =
    answers.length > 1
      ? "Scores are log-probabilities divided by the length; the bars compare them with the best."
      : "The score is the log-probability divided by the length. Use beam search or sampling for several outputs.";
  panel.replaceChildren(element("p", { class: "hint" }, hint), element("ol", { class: "answers" }, ...items));
}

/** Show the tokens of both sides; a side is {title, tokens, ids}. */
export function showTokens(panel, sides) {
  panel.replaceChildren(
    ...sides.flatMap(({ title, tokens, ids }) => [
      element("p", { class: "token-title" }, `${title}: ${ids.length} ${ids.length === 1 ? "token" : "tokens"}`),
      element(
        "ol",
        { class: "tokens" },
        ...ids.map((id, place) =>
          element("li", {}, element("b", {}, visible(tokens[place] ?? "")), element("small", {}, id)),
        ),
      ),
    ]),
  );
}
