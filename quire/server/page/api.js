// Talking to the server: the key goes into a header, never into an address.
const KEY = "quire-key";

export const key = {
  get() {
    try { return sessionStorage.getItem(KEY) || ""; } catch { return memory; }
  },
  set(value) {
    memory = value;
    try { sessionStorage.setItem(KEY, value); } catch { /* storage may be switched off: this tab still has it */ }
  },
};
let memory = "";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** fetch with the key; an answer that is no success becomes an ApiError with the server's own sentence. */
export async function request(path, { body, signal, requestId } = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (body) headers["content-type"] = "application/json";
  if (requestId) headers["x-request-id"] = requestId;
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body ? JSON.stringify(body) : undefined,
    signal,
    cache: "no-store",
  });
  if (!response.ok) {
    let message = `the server answered ${response.status}`;
    let code = "";
    try {
      const { error } = await response.json();
      message = error.message || message;
      code = error.code || "";
    } catch { /* a proxy's page */ }
    if (response.status === 401) dispatchEvent(new CustomEvent("quire-key-wanted", { detail: message }));
    throw new ApiError(response.status, message, code);
  }
  return response;
}

/** The lines of a streamed answer, as they come. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
