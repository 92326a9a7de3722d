// The request that the playground sends, as something to paste.

/** `path` is below the OpenAI-compatible base; the key is named, never shown. */
export function curl(path, body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${location.origin}/oai/api/v1${path} \\\n  -H "Authorization: Bearer $TINKER_API_KEY" \\\n  -H "Content-Type: application/json" \\\n  -d '${json}'`;
}

export function python(path, body) {
  const call = path === "/chat/completions" ? "chat.completions" : "completions";
  const fields = Object.entries(body).map(([name, value]) => `    ${name}=${literal(value)},`);
  return [
    "import os", "from openai import OpenAI", "",
    `client = OpenAI(base_url="${location.origin}/oai/api/v1", api_key=os.environ["TINKER_API_KEY"])`,
    `answer = client.${call}.create(`, ...fields, ")", "print(answer.choices[0])",
  ].join("\n");
}

function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${literal(v)}`).join(", ")}}`;
  return JSON.stringify(value);
}
