// Asking the server, with the browser's session. When the session is over, the login page.

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export function toLogin(reason = "") {
  const here = location.pathname + location.search;
  const query = new URLSearchParams({ next: here, ...(reason && { reason }) });
  location.replace(`/login?${query}`);
  return new Promise(() => {}); // the page is going away: nothing that waits may go on
}

export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = given.length ? `?${new URLSearchParams(given)}` : "";
  return read(await ask(path + search, {}));
}

export async function send(method, path, body) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  return read(await ask(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) }));
}

/** The answer itself, for those who read a stream. */
export async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached; is it running?");
  }
  if (answer.status === 401) return toLogin("ended");
  if (!answer.ok) throw new ApiError(answer.status, await detail(answer));
  return answer;
}

async function read(answer) {
  return answer.status === 204 ? null : answer.json();
}

async function detail(answer) {
  try {
    const body = await answer.json();
    return body.detail ?? body.error?.message ?? `the server answered ${answer.status}`;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

export const path = (...parts) => "/api/v1/" + parts.map(encodeURIComponent).join("/");
