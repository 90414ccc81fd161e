// Create elements; strings are inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Return an element with attributes and children; a string becomes text. */
export function element(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** Return an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/** Write pairs of term and value into a description list. */
export function describe(list, pairs) {
  const rows = pairs.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value)));
  list.replaceChildren(...rows);
}

const INVISIBLE = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]|[^\P{Zs} ]/gu;

/** Make a token visible: spaces as ␣, invisible characters by their code points. */
export function visible(token) {
  const named = (character) => `⟨U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  return token.replace(INVISIBLE, named).replaceAll(" ", "␣");
}
