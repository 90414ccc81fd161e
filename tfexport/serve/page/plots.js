// Plot the last two minutes as SVG lines.

import { element, svg } from "./dom.js";

const SECONDS = 120;
const [WIDTH, HEIGHT] = [300, 90];

const number = (value) => (Number.isNaN(value) ? "–" : value >= 100 ? value.toFixed(0) : String(+value.toPrecision(2)));
const seconds = (value) =>
  Number.isNaN(value) ? "–" : value < 0.995 ? `${+(value * 1000).toPrecision(2)} ms` : `${+value.toPrecision(2)} s`;

const PLOTS = [
  { title: "Requests", least: 4, format: number, series: { running: "running", waiting: "waiting" } },
  { title: "Batch occupancy", top: "slots", least: 1, format: number, series: { rows: "rows per step" } },
  { title: "Request latency", least: 0.01, format: seconds, series: { median: "median", slow: "95 %" } },
  { title: "Tokens per second", least: 10, format: number, series: { tokens: "all requests" } },
];

/** Put the plots into an element; return a function that draws points into them. */
export function plots(place) {
  const drawn = PLOTS.map(plot);
  place.replaceChildren(...drawn.map(({ figure }) => figure));
  return (points) => drawn.forEach(({ draw }) => draw(points));
}

function plot({ title, top, least, format, series }) {
  const keys = Object.keys(series);
  const values = keys.map(() => element("dd", {}, "–"));
  const area = svg("path", { class: "area" });
  const lines = keys.map((_, place) => svg("path", { class: place ? "line second" : "line" }));
  const ceiling = element("span", { class: "top-label" });
  const axis = ["M0 0H300", "M0 90H300"].map((d) => svg("path", { class: "axis", d }));
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    ...axis, area, ...lines,
  );
  const legend = keys.map((key, place) => element("div", {}, element("dt", {}, series[key]), values[place]));
  const figure = element(
    "figure",
    { class: "card plot" },
    element("h3", {}, title),
    element("dl", { class: "legend" }, ...legend),
    element("div", { class: "drawing" }, picture, ceiling),
    element("div", { class: "times", "aria-hidden": "true" }, element("span", {}, "2 min ago"), element("span", {}, "now")),
  );

  function draw(points) {
    const last = points.at(-1);
    if (!last) return;
    const found = points.flatMap((point) => keys.map((key) => point[key])).filter((value) => !Number.isNaN(value));
    const most = (top && last[top]) || round(Math.max(least, ...found));
    keys.forEach((key, place) => {
      values[place].textContent = format(last[key]);
      lines[place].setAttribute("d", path(points, key, most, last.time));
    });
    area.setAttribute("d", under(points, keys[0], most, last.time));
    ceiling.textContent = format(most);
  }

  return { figure, draw };
}

/** Return the next round number, for the top of an axis. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value * 0.999);
}

const at = (point, key, most, now) => {
  const x = WIDTH * (1 - (now - point.time) / SECONDS);
  return `${x.toFixed(1)} ${(HEIGHT * (1 - Math.min(1, point[key] / most))).toFixed(1)}`;
};

/** Split the points at missing values. */
function runs(points, key) {
  const found = [[]];
  for (const point of points) {
    if (Number.isNaN(point[key])) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length > 0);
}

const path = (points, key, most, now) =>
  runs(points, key).map((run) => `M${run.map((point) => at(point, key, most, now)).join("L")}`).join("");

function under(points, key, most, now) {
  const x = (point) => (WIDTH * (1 - (now - point.time) / SECONDS)).toFixed(1);
  return runs(points, key)
    .map((run) => `M${x(run[0])} ${HEIGHT}L${run.map((point) => at(point, key, most, now)).join("L")}L${x(run.at(-1))} ${HEIGHT}Z`)
    .join("");
}
