// Plot cross-attention: a row for each output token, a column for each source token.

import { element, svg, visible } from "./dom.js";

// Pixels of a cell, at least and at most, and of a character.
const [SMALLEST, LARGEST] = [12, 22];
const CHARACTER = 8;
const MAX_LABEL = 14;
const MAX_TOKENS = 96;

/** Draw the weights [target tokens, source tokens]; the caption describes the cell under the pointer. */
export function showAlignment(panel, { source_tokens, target_tokens, weights, source_positions }) {
  const columns = source_tokens.slice(0, MAX_TOKENS).map(label);
  const rows = target_tokens.slice(0, MAX_TOKENS).map(label);
  const left = 10 + CHARACTER * longest(rows);
  const isTurned = longest(columns) > 2;
  const top = 8 + (isTurned ? CHARACTER * longest(columns) : 14);
  const room = Math.floor((panel.clientWidth - left - 2) / columns.length);
  const size = Math.min(LARGEST, Math.max(SMALLEST, room));
  const [width, height] = [left + size * columns.length + 2, top + size * rows.length + 2];
  const pairs = rows.map((row, r) => `${row} from ${columns[source_positions[r]] ?? "a token that is not shown"}`);

  const cell = (kind, r, c, more) =>
    svg("rect", { class: kind, x: left + size * c, y: top + size * r, width: size, height: size, ...more });
  const picture = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Alignment: ${pairs.join(", ")}`,
  });
  columns.forEach((text, c) => {
    const x = left + size * (c + 0.5);
    const turned = isTurned ? { transform: `rotate(-90 ${x} ${top - 6})`, "text-anchor": "start", dy: "0.35em" } : { "text-anchor": "middle" };
    picture.append(svg("text", { x, y: top - 6, ...turned }, text));
  });
  rows.forEach((text, r) => {
    picture.append(svg("text", { x: left - 7, y: top + size * (r + 0.5), dy: "0.35em", "text-anchor": "end" }, text));
    columns.forEach((_, c) => {
      const opacity = Math.min(1, weights[r][c]).toFixed(3);
      if (opacity < 0.005) return;
      picture.append(cell("cell", r, c, { "fill-opacity": opacity }));
    });
  });
  for (let r = 0; r <= rows.length; r++) picture.append(line(left, top + size * r, width - 2, top + size * r));
  for (let c = 0; c <= columns.length; c++) picture.append(line(left + size * c, top, left + size * c, height - 2));
  const under = cell("under", 0, 0, { visibility: "hidden" });
  picture.append(under);

  const hint = "Each row shows the attention of an output token; a stronger color is a larger weight.";
  const cut = rows.length < target_tokens.length || columns.length < source_tokens.length;
  const usual = cut ? `${hint} The first ${MAX_TOKENS} tokens of each side are shown.` : hint;
  const caption = element("figcaption", {}, usual);
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left - left) / size);
    const r = Math.floor((event.clientY - box.top - top) / size);
    const isInside = rows[r] !== undefined && columns[c] !== undefined;
    caption.textContent = isInside ? `${rows[r]} attends to ${columns[c]} with ${(100 * weights[r][c]).toFixed(0)} %` : usual;
    under.setAttribute("visibility", isInside ? "visible" : "hidden");
    if (isInside) {
      under.setAttribute("x", left + size * c);
      under.setAttribute("y", top + size * r);
    }
  });
  picture.addEventListener("pointerleave", () => {
    caption.textContent = usual;
    under.setAttribute("visibility", "hidden");
  });
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Alignment" }, picture);
  panel.replaceChildren(element("figure", { class: "alignment" }, caption, scroll));
}

function label(token) {
  const shown = [...visible(token)];
  return shown.length > MAX_LABEL ? `${shown.slice(0, MAX_LABEL - 1).join("")}…` : shown.join("");
}

const longest = (labels) => Math.max(1, ...labels.map((text) => [...text].length));

const line = (x1, y1, x2, y2) => svg("path", { class: "grid", d: `M${x1} ${y1}L${x2} ${y2}` });
