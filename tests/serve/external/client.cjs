// The npm package openai in front of a server: `node client.cjs BASE_URL`, findings as JSON.

const { OpenAI } = require("openai");

const sent = new Set(); // names of headers
const client = new OpenAI({
  baseURL: process.argv[2],
  apiKey: "none",
  maxRetries: 0,
  fetch: (url, options) => {
    for (const [name] of new Headers(options.headers)) sent.add(name);
    return fetch(url, options);
  },
});
const messages = [{ role: "user", content: "hello" }];
const asked = { model: "any", messages, max_tokens: 12 };
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, secret: { type: "string", format: "password", maxLength: 3 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];

async function streamed(body) {
  const stream = await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
  let text = "", usage = null, reason = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    reason = chunk.choices[0]?.finish_reason ?? reason;
    usage = chunk.usage ?? usage;
  }
  return { text, usage, reason };
}

async function refused(body) {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
  return null;
}

async function main() {
  const whole = await client.chat.completions.create(asked);
  const forced = { ...asked, max_tokens: 150, tools, tool_choice: "required", parallel_tool_calls: false };
  const called = await client.chat.completions.create(forced);
  const calling = client.chat.completions.stream(forced);
  const format = { type: "json_schema", json_schema: { name: "it", schema: parameters, strict: true } };
  const held = await client.chat.completions.create({ ...asked, max_tokens: 150, response_format: format });
  const models = [];
  for await (const model of client.models.list()) models.push(model);
  console.log(JSON.stringify({
    whole: { text: whole.choices[0].message.content, usage: whole.usage, reason: whole.choices[0].finish_reason },
    streamed: await streamed(asked),
    called: called.choices[0].message.tool_calls.map((call) => call.function),
    calling: (await calling.finalMessage()).tool_calls.map((call) => call.function),
    held: JSON.parse(held.choices[0].message.content),
    refused: await refused({ ...asked, temperature: -1 }),
    missing: await refused({ ...asked, messages: [] }),
    models,
    sent: [...sent],
  }));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
