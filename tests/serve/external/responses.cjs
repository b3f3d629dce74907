// The npm package openai on responses and embeddings: `node responses.cjs BASE_URL`, findings as JSON.

const { OpenAI } = require("openai");

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "any", input: "x", max_output_tokens: 3 };

async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    return error.message;
  }
}

async function main() {
  const whole = await client.responses.create(asked);
  const kinds = [];
  let streamed = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  const final = await client.responses.stream(asked).finalResponse();
  const next = await client.responses.create({ ...asked, previous_response_id: whole.id });
  const items = [];
  for await (const item of client.responses.inputItems.list(next.id, { limit: 2 })) items.push(item.type);
  const stored = await client.responses.retrieve(next.id);
  await client.responses.delete(whole.id);
  const texts = await client.embeddings.create({ model: "any", input: ["a", "b"] });
  const ids = { model: "any", input: [[97], [98]], encoding_format: "float", dimensions: 1 };
  const floats = await client.embeddings.create(ids);
  return {
    texts: [whole.output_text, streamed, final.output_text, stored.output_text],
    kinds,
    items,
    deleted: await refused(client.responses.retrieve(whole.id)),
    vectors: texts.data.map((each) => each.embedding),
    floats: floats.data.map((each) => each.embedding),
    empty: await refused(client.embeddings.create({ model: "any", input: "" })),
  };
}

main().then((found) => console.log(JSON.stringify(found)));
