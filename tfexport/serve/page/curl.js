// The present request as a command for a shell.

import { element } from "./dom.js";

/** Show the command, with a button that copies it. */
export function showCommand(panel, url, body, stream) {
  const command = [
    `curl${stream ? " -N" : ""} ${quoted(url)}`,
    `  -H 'Content-Type: application/json'`,
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join(" \\\n");
  const copy = element("button", { type: "button", onclick: () => copied(copy, code) }, "Copy");
  const code = element("code", {}, command);
  panel.replaceChildren(element("div", { class: "command" }, element("pre", { tabindex: "0" }, code), copy));
}

// In single quotes a shell takes everything as it is but a single quote; what cannot be seen is escaped by JSON.
function quoted(text) {
  const plain = text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (character) =>
    [...Array(character.length).keys()]
      .map((place) => `\\u${character.charCodeAt(place).toString(16).padStart(4, "0")}`)
      .join(""),
  );
  return `'${plain.replaceAll("'", "'\\''")}'`;
}

async function copied(button, code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
