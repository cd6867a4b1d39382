// The session routes as functions: replies as they are streamed, errors with all their reasons.

// The page lies below /v1/streaming and, without a key in front of it, below /streaming. The routes are at the former.
const base = location.pathname.replace(/(\/v1)?\/streaming\/console$/, "/v1/streaming");

export class ApiError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    const message = error.message ?? (typeof error === "string" ? error : "the answer is not one of this API");
    super(message);
    this.status = status;
    this.code = error.code ?? "";
    this.reasons = error.reasons ?? [message];
    if (status === 401) this.reasons = [`${message}: this server wants an API key; write it into the field above`];
  }
}

// One client per session: the routing key keeps the session on its server when a router stands in front of several.
export class Client {
  #headers;

  constructor(key) {
    const bytes = crypto.getRandomValues(new Uint8Array(8));
    const routingKey = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
    this.#headers = {"X-Session-ID": `console-${routingKey}`};
    if (key) this.#headers.Authorization = `Bearer ${key}`;
  }

  config = () => this.#json("GET", "config");
  open = (wanted) => this.#json("POST", "sessions", JSON.stringify(wanted), {"Content-Type": "application/json"});
  status = (id) => this.#json("GET", `sessions/${id}`);
  close = (id) => this.#json("DELETE", `sessions/${id}`);

  // Close without waiting for the answer: the page is going away.
  abandon(id) {
    fetch(`${base}/sessions/${id}`, {method: "DELETE", headers: this.#headers, keepalive: true}).catch(() => {});
  }

  // Push a chunk; call onText with each piece of the reply; return the whole reply.
  async push(id, text, image, onText) {
    let body = text;
    let type = {"Content-Type": "text/plain"};
    if (image) {
      body = new FormData();
      body.append("image", image);
      if (text) body.append("text", text);
      type = {}; // the browser writes it, with the boundary
    }
    const answer = await this.#fetch("POST", `sessions/${id}/frame?stream=true`, body, type);
    let why = "it ended before the reply did";
    try {
      for await (const {name, data} of serverSentEvents(answer.body)) {
        if (name === "reply") return data;
        if (name === "error") throw new ApiError(0, data); // the status has long been sent
        onText(data.text);
      }
    } catch (error) {
      if (error instanceof ApiError) throw error;
      why = error.message;
    }
    throw new ApiError(0, {error: {message: `the stream of the reply broke off (${why})`, code: "broken_stream"}});
  }

  async #json(...request) {
    return (await this.#fetch(...request)).json();
  }

  async #fetch(method, path, body, headers = {}) {
    let answer;
    try {
      const all = {...this.#headers, ...headers};
      answer = await fetch(`${base}/${path}`, {method, body, headers: all, cache: "no-store"});
    } catch (error) {
      throw new ApiError(0, {error: {message: `the server cannot be reached (${error.message})`, code: "unreachable"}});
    }
    if (!answer.ok) throw new ApiError(answer.status, await answer.json().catch(() => null));
    return answer;
  }
}

async function* serverSentEvents(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (rest + decoder.decode(value, {stream: true})).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      yield {name: fields.event ?? "message", data: JSON.parse(fields.data)};
    }
  }
}
