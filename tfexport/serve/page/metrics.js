// Metrics of the server, scraped once a second as Prometheus text, for the last two minutes.

const SECONDS = 120;
// Latencies are those of the requests that ended in the last 10 seconds.
const WINDOW = 10;
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Yield {name, labels, value} of each sample. */
export function* samples(text) {
  for (const row of text.split("\n")) {
    const found = LINE.exec(row);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, plain(value)]));
    yield { name: found[1], labels, value: Number(found[3]) };
  }
}

const plain = (value) => value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));

/** The recent metrics of one model. */
export class History {
  #scrapes = [];
  points = [];

  /** Add a scrape; `time` is in seconds. */
  add(text, model, time) {
    const scrape = { time, buckets: new Map(), values: new Map() };
    for (const { name, labels, value } of samples(text)) {
      if (labels.model !== model) continue;
      if (name === "tfexport_request_seconds_bucket") scrape.buckets.set(bound(labels.le), value);
      else scrape.values.set(name, (scrape.values.get(name) ?? 0) + value);
    }
    const before = this.#scrapes.at(-1);
    this.#scrapes.push(scrape);
    this.#scrapes = this.#scrapes.filter((one) => one.time >= time - WINDOW);
    this.points.push(this.#point(scrape, before));
    this.points = this.points.filter((point) => point.time >= time - SECONDS);
  }

  #point(now, before) {
    const value = (name) => now.values.get(`tfexport_${name}`) ?? 0;
    const gained = (name) => Math.max(0, value(name) - (before?.values.get(`tfexport_${name}`) ?? value(name)));
    const steps = gained("step_batch_size_count");
    const rows = gained("step_batch_size_sum");
    return {
      time: now.time,
      waiting: value("requests_waiting"),
      running: value("requests_running"),
      slots: value("slots"),
      rows: steps ? rows / steps : value("slots_used"),
      tokens: before ? rows / (now.time - before.time) : 0,
      median: quantile(0.5, now.buckets, this.#scrapes[0].buckets),
      slow: quantile(0.95, now.buckets, this.#scrapes[0].buckets),
    };
  }
}

const bound = (le) => (le === "+Inf" ? Infinity : Number(le));

/** Return a quantile of the samples between two scrapes, as Prometheus computes it; NaN if there are none. */
export function quantile(share, now, before) {
  const counts = [...now].map(([le, count]) => [le, count - (before.get(le) ?? 0)]).sort(([a], [b]) => a - b);
  const rank = share * (counts.at(-1)?.[1] ?? 0);
  if (!(rank > 0)) return NaN;
  let [low, below] = [0, 0];
  for (const [le, count] of counts) {
    if (count >= rank) return le === Infinity ? low : low + ((le - low) * (rank - below)) / (count - below);
    [low, below] = [le, count];
  }
  return low;
}
