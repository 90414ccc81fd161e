// Send requests: JSON, event streams, metrics. Paths are relative, so that the server can be behind a proxy's prefix.

let token = "";

export function setToken(value) {
  token = value.trim();
}

export const needsToken = (error) => error instanceof Refusal && error.status === 401;

/** An error response: its status code, and the server's message. */
export class Refusal extends Error {
  constructor(status, message, retryAfter = "") {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const urlOf = (path) => new URL(path, document.baseURI).href;
export const pathOf = (model, verb) => `v2/models/${encodeURIComponent(model)}/${verb}`;

export async function getJson(path, signal) {
  return (await send(path, { signal })).json();
}

export async function getText(path, signal) {
  return (await send(path, { signal, headers: { Accept: "text/plain" } })).text();
}

export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

/** Yield the data of each event. */
export async function* postEvents(path, body, signal) {
  const response = await post(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length === 0) continue;
      const data = JSON.parse(lines.map((line) => line.slice(5)).join("\n"));
      if (data.error !== undefined) throw new Refusal(response.status, data.error);
      yield data;
    }
  }
}

function post(path, body, signal) {
  if (body instanceof FormData) return send(path, { method: "POST", body, signal });
  const headers = { "Content-Type": "application/json" };
  return send(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function send(path, options) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  const response = await fetch(urlOf(path), { ...options, headers, cache: "no-store", credentials: "same-origin" });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const message = typeof body.error === "string" ? body.error : `the server returned status ${response.status}`;
  throw new Refusal(response.status, message, response.headers.get("Retry-After") ?? "");
}
