// Show the current request as a shell command.

import { element } from "./dom.js";

/** Show the command, with a button that copies it. */
export function showCommand(panel, url, body, stream) {
  const sent = body instanceof FormData ? [...body].map(formField) : [`-H 'Content-Type: application/json'`, `-d ${quoted(JSON.stringify(body))}`];
  const command = [`curl${stream ? " -N" : ""} ${quoted(url)}`, ...sent].join(" \\\n  ");
  const copy = element("button", { type: "button", onclick: () => copied(copy, code) }, "Copy");
  const code = element("code", {}, command);
  panel.replaceChildren(element("div", { class: "command" }, element("pre", { tabindex: "0" }, code), copy));
}

function formField([name, value]) {
  const path = value instanceof File && value.name.replace(/["\\]/g, "\\$&");
  return `-F ${quoted(path === false ? `${name}=${value}` : `${name}=@"${path}"`)}`;
}

// A shell changes nothing in single quotes, except single quotes; JSON escapes invisible characters.
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
