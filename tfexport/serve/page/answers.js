// What came back: answers with their scores as bars, and tokens.

import { element, visible } from "./dom.js";

const REASONS = { eos: "Complete", length: "Cut off at the limit", stop: "Ended at the stop text", time: "Out of time" };

const score = (value) => value.toFixed(3).replace(/^-0\.0+$/, "0.000").replace("-", "−");
export const reason = (given) => REASONS[given] ?? given ?? "";

/** Show answers in their order; `choose` is called with the number of the one that is clicked. */
export function showAnswers(panel, answers, chosen, choose) {
  if (answers.length === 0) {
    panel.replaceChildren(element("p", { class: "hint" }, "Ask for several answers with beam search or sampling."));
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
        element("span", { class: "said", dir: "auto" }, answer.text || "(empty)"),
        element("span", { class: "score", title: reason(answer.reason) }, score(answer.score)),
        element("span", { class: "bar", "aria-hidden": "true" }, bar),
      ),
    );
  });
  const said =
    answers.length > 1
      ? "Log-probability of each answer, by its length; the bars compare them with the best."
      : "Log-probability of the answer, by its length. Beam search and sampling can give several answers.";
  panel.replaceChildren(element("p", { class: "hint" }, said), element("ol", { class: "answers" }, ...items));
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
