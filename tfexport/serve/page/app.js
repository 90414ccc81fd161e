// The page: the request, the output, and the state of the server.

import { showAlignment } from "./alignment.js";
import { reason, showAnswers, showTokens } from "./answers.js";
import { getJson, getText, needsToken, pathOf, postEvents, postJson, setToken, urlOf } from "./api.js";
import { showCommand } from "./curl.js";
import { byId, describe, element } from "./dom.js";
import { chosenFile, connect, showSource } from "./files.js";
import { History } from "./metrics.js";
import { canStream, parameters, setDefaults, showFields, strategy } from "./options.js";
import { plots } from "./plots.js";

const EMPTY = { text: "", answers: [], chosen: 0, source: null };
const PERIOD_MS = 1000;
// Color and text for the state of a model that is not ready.
const STATES = {
  starting: ["loading", "loading the model"],
  ready: ["failed", "does not respond"],
  draining: ["draining", "draining"],
  stopped: ["failed", "stopped"],
  failed: ["failed", "failed"],
};

let models = [];
let running = null;
let result = EMPTY;
let hasMetrics = true;
const histories = new Map();
const drawPlots = plots(byId("plots"));

const model = () => models.find(({ name }) => name === byId("model").value);

// Models

async function loadModels() {
  const found = await getJson("page/models");
  const before = model();
  models = found.models;
  byId("access").hidden = true;
  const names = models.map(({ name }) => name);
  const select = byId("model");
  if (names.join("\n") !== [...select.options].map(({ value }) => value).join("\n")) {
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
  select.disabled = names.length < 2;
  const now = model();
  if (before?.name !== now.name || !before.facts !== !now.facts) chooseModel();
  if (found.is_leaving) showState("draining", now.state === "ready" ? "about to stop" : "draining");
  else showState(...(now.is_ready ? ["ready", "ready"] : STATES[now.state]));
}

function showState(state, text) {
  byId("state").dataset.state = state;
  if (byId("state-text").textContent !== text) byId("state-text").textContent = text;
  byId("generate").disabled = running !== null || !model()?.facts || model().reads === "features";
}

function chooseModel() {
  const { facts, examples = [], defaults = {} } = model();
  running?.abort();
  describe(byId("facts"), Object.entries(facts ?? {}));
  byId("examples").hidden = examples.length === 0;
  byId("examples").replaceChildren(
    ...examples.map((text) => element("button", { type: "button", dir: "auto", title: text, onclick: () => fill(text) }, text)),
  );
  showSource(model().reads ?? "text");
  if (facts) setDefaults(defaults, model().max_target_length);
  if (byId("text").value === "" && examples.length > 0) byId("text").value = examples[0];
  setResult(EMPTY);
}

function fill(text) {
  byId("text").value = text;
  byId("text").focus();
  showPanels();
}

// Requests

function request() {
  const given = parameters();
  const stream = canStream(given);
  const source = isText() ? byId("text").value : null;
  const sent = isText() ? { text_input: source, ...(Object.keys(given).length > 0 && { parameters: given }) } : form(given);
  return { source, body: sent, given, stream, path: pathOf(byId("model").value, stream ? "generate_stream" : "generate") };
}

const isText = () => (model()?.reads ?? "text") === "text";

function form(given) {
  const form = new FormData();
  form.append("file", chosenFile() ?? new File([], "FILE"));
  if (Object.keys(given).length > 0) form.append("parameters", JSON.stringify(given));
  return form;
}

async function generate() {
  if (running !== null || byId("generate").disabled) return;
  const { source, body, given, stream, path } = request();
  if (!isText() && !chosenFile()) {
    showError(new Error("choose a file first"));
    return;
  }
  const controller = (running = new AbortController());
  const times = { start: performance.now(), first: NaN, end: NaN };
  setResult({ ...EMPTY, source });
  setRunning(true);
  try {
    const answers = await (stream ? streamed(path, body, given.prefix, times, controller.signal) : whole(path, body, controller.signal));
    times.end = performance.now();
    setResult({ source, answers, chosen: 0 });
    showNumbers(times, answers);
    byId("status").textContent = reason(answers[0]?.reason);
    byId("spoken").textContent = `${reason(answers[0]?.reason)}: ${answers[0]?.text}`;
  } catch (error) {
    if (controller.signal.aborted) byId("status").textContent = "Cancelled";
    else showError(error);
  } finally {
    running = null;
    setRunning(false);
    showState(byId("state").dataset.state, byId("state-text").textContent);
  }
}

async function streamed(path, body, prefix, times, signal) {
  const prefixLength = prefix?.length ?? 0;
  const output = byId("answer");
  let [text, pieces] = ["", 0];
  for await (const event of postEvents(path, body, signal)) {
    if (event.finish_reason !== undefined) return [answer(event, text)];
    text += event.text_output;
    output.append(event.text_output);
    output.scrollTop = output.scrollHeight;
    if (text.length <= prefixLength) continue;
    if (pieces === 0) times.first = performance.now();
    pieces += 1;
    showNumbers({ ...times, end: performance.now() }, null, pieces);
  }
  throw new Error("the server ended the stream before the output was complete");
}

async function whole(path, body, signal) {
  const { text_output: texts, output_ids: ids, scores, finish_reason: reasons } = await postJson(path, body, signal);
  if (!Array.isArray(texts)) return [answer({ output_ids: ids, scores, finish_reason: reasons }, texts)];
  return texts.map((text, place) => answer({ output_ids: ids[place], scores: scores[place], finish_reason: reasons[place] }, text));
}

const answer = (event, text) => ({ text, ids: event.output_ids, score: event.scores, reason: event.finish_reason });

function setRunning(isRunning) {
  byId("generate").disabled = isRunning;
  byId("cancel").disabled = !isRunning;
  byId("answer").classList.toggle("running", isRunning);
  byId("answer").setAttribute("aria-busy", String(isRunning));
  if (isRunning) byId("status").textContent = "Generating";
}

function setResult(given) {
  result = given;
  byId("error").hidden = true;
  byId("status").textContent = "";
  byId("answer").textContent = result.answers[result.chosen]?.text ?? "";
  if (result.answers.length === 0) showNumbers({}, null, 0);
  showPanels();
}

function showError(error) {
  const again = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const isNetwork = error instanceof TypeError;
  byId("error").textContent = (isNetwork ? "The server cannot be reached." : sentence(error.message)) + again;
  byId("error").hidden = false;
  byId("status").textContent = "";
  if (needsToken(error)) askForToken();
}

const sentence = (line) => line.charAt(0).toUpperCase() + line.slice(1) + (/[.!?…]$/.test(line) ? "" : ".");

function showNumbers({ start, first, end }, answers, pieces = 0) {
  const count = answers ? (answers[0]?.ids.length ?? 0) : pieces;
  const [ttft, total] = [first - start, end - start];
  const rate = count > 1 && end > first ? ((count - 1) / (end - first)) * 1000 : NaN;
  describe(byId("numbers"), [
    ["First token", milliseconds(ttft)],
    ["Tokens per second", Number.isNaN(rate) ? "–" : rate >= 10 ? rate.toFixed(0) : rate.toFixed(1)],
    ["Tokens", count || "–"],
    ["Total time", milliseconds(total)],
  ]);
}

const milliseconds = (value) =>
  !Number.isFinite(value) ? "–" : value < 1000 ? `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms` : `${(value / 1000).toFixed(2)} s`;

// Panels

const hint = (text) => element("p", { class: "hint" }, text);
const openTab = () => document.querySelector("[role=tab][aria-selected=true]").id.slice("tab-".length);

async function showPanels() {
  const { answers, chosen } = result;
  const now = result;
  const [name, panel] = [openTab(), byId(`panel-${openTab()}`)];
  if (name === "curl") {
    const { body, stream, path } = request();
    showCommand(panel, urlOf(path), body, stream);
  } else if (name === "answers") {
    showAnswers(panel, answers, chosen, choose);
  } else if (answers.length === 0) {
    panel.replaceChildren(hint(name === "tokens" ? "Shows the source and output tokens." : "Shows the attention of each output token to the source."));
  } else {
    if (name === "alignment" && !isText()) {
      panel.replaceChildren(hint("The page shows alignments of texts only."));
      return;
    }
    if (name === "alignment" && !model().has_alignment) {
      panel.replaceChildren(hint("This bundle was exported without alignment. Export it with --alignment -1 to see the attention of each output token."));
      return;
    }
    try {
      const show = await { tokens: tokensOf, alignment: alignmentOf }[name](result);
      if (result === now && openTab() === name) show(panel);
    } catch (error) {
      if (result === now) panel.replaceChildren(hint(sentence(error.message)));
    }
  }
}

function choose(place) {
  result = { ...result, chosen: place };
  byId("answer").textContent = result.answers[place].text;
  showPanels();
  document.querySelectorAll(".answers button")[place]?.focus();
}

async function tokensOf({ source, answers, chosen }) {
  const given = source === null ? { input_ids: [] } : { text_input: source };
  const sides = await postJson(`page/models/${encodeURIComponent(byId("model").value)}/tokens`, { ...given, target_ids: answers[chosen].ids });
  const shown = [
    { title: "Source", ids: sides.source_ids, tokens: sides.source_tokens },
    { title: "Output", ids: sides.target_ids, tokens: sides.target_tokens },
  ];
  return (panel) => showTokens(panel, source === null ? shown.slice(1) : shown);
}

async function alignmentOf({ source, answers, chosen }) {
  const found = await postJson(pathOf(byId("model").value, "align"), { text_input: source, target_ids: answers[chosen].ids });
  return (panel) => showAlignment(panel, found);
}

function openPanel(tab) {
  for (const other of document.querySelectorAll("[role=tab]")) {
    const isOpen = other === tab;
    other.setAttribute("aria-selected", String(isOpen));
    other.tabIndex = isOpen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !isOpen;
  }
  showPanels();
}

function moveInTabs(event) {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
  next.focus();
  openPanel(next);
}

// The server

async function poll() {
  if (document.hidden) return;
  try {
    await loadModels();
    if (!hasMetrics) return;
    const text = await getText("metrics");
    const time = performance.now() / 1000;
    for (const { name } of models) {
      if (!histories.has(name)) histories.set(name, new History());
      histories.get(name).add(text, name, time);
    }
    drawPlots(histories.get(byId("model").value).points);
  } catch (error) {
    if (needsToken(error)) askForToken();
    else if (error.status === 404) {
      hasMetrics = false;
      byId("plots-status").textContent = "This server has no metrics";
    } else showState("unreachable", "unreachable");
  }
}

async function pollForever() {
  await poll();
  setTimeout(pollForever, PERIOD_MS);
}

function askForToken() {
  showState("waiting", "token required");
  byId("access").hidden = false;
}

// Wiring

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("ask").addEventListener("input", () => openTab() === "curl" && showPanels());
byId("cancel").addEventListener("click", () => running?.abort());
byId("model").addEventListener("change", chooseModel);
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  setToken(byId("token").value);
  poll();
});
for (const choice of document.querySelectorAll("input[name=strategy]")) choice.addEventListener("change", showFields);
for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => openPanel(tab));
  tab.addEventListener("keydown", moveInTabs);
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});

connect(() => showPanels());
showFields();
showNumbers({}, null);
showPanels();
pollForever();
