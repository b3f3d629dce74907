"use strict";

// Everything a model says is put into the page as text nodes; nothing is ever parsed as HTML.

const $ = (id) => document.getElementById(id);
const chat = $("chat");
let messages = [];
let running = null;

function make(tag, name, text) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
}

function headers() {
  const found = { "content-type": "application/json" };
  if ($("key").value) found.authorization = "Bearer " + $("key").value;
  return found;
}

// Marks inside a line: code, bold, italics. Whatever is left open stays as it was written.
function addInline(parent, text) {
  const marks = /(`+)([^`]+)\1|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
  let from = 0;
  for (const found of text.matchAll(marks)) {
    parent.append(text.slice(from, found.index));
    if (found[2] !== undefined) parent.append(make("code", "", found[2]));
    else if (found[3] !== undefined) parent.append(make("strong", "", found[3]));
    else parent.append(make("em", "", found[4]));
    from = found.index + found[0].length;
  }
  parent.append(text.slice(from));
}

function kindOf(line) {
  if (/^#{1,6} /.test(line)) return "heading";
  if (/^\s*[-*+] /.test(line)) return "ul";
  if (/^\s*\d+[.)] /.test(line)) return "ol";
  if (/^> ?/.test(line)) return "quote";
  return line.trim() ? "p" : "";
}

function addBlock(parent, kind, lines) {
  if (kind === "heading") {
    for (const line of lines) addInline(parent.appendChild(make("h3")), line.replace(/^#+ /, ""));
  } else if (kind === "ul" || kind === "ol") {
    const list = parent.appendChild(make(kind));
    for (const line of lines) {
      addInline(list.appendChild(make("li")), line.replace(/^\s*([-*+]|\d+[.)]) /, ""));
    }
  } else if (kind === "quote") {
    addInline(parent.appendChild(make("blockquote")), lines.map((l) => l.slice(1)).join("\n"));
  } else {
    addInline(parent.appendChild(make("p")), lines.join("\n"));
  }
}

function render(parent, text) {
  parent.replaceChildren();
  let kind = "", block = [], code = null, fence = "";
  const close = () => {
    if (block.length) addBlock(parent, kind, block);
    block = [];
  };
  for (const line of text.split("\n")) {
    const found = line.match(/^\s*(```+|~~~+)/);
    if (code !== null) {
      if (found && line.trim().startsWith(fence)) code = null;
      else code.textContent += line + "\n";
    } else if (found) {
      close();
      fence = found[1];
      code = parent.appendChild(make("pre")).appendChild(make("code"));
    } else {
      const next = kindOf(line);
      if (next !== kind) close();
      kind = next;
      if (kind) block.push(line);
    }
  }
  close();
}

function addTurn(role) {
  const turn = make("div", "turn " + role);
  const thought = make("details", "thought");
  thought.hidden = true;
  thought.append(make("summary", "", "Reasoning"), make("div"));
  const text = make("div", "text");
  const note = make("div", "dim");
  turn.append(thought, text, note);
  chat.append(turn);
  return { turn, thought, text, note, reasoning: "", content: "" };
}

function atBottom() {
  return chat.scrollHeight - chat.scrollTop - chat.clientHeight < 60;
}

function show(answer) {
  const stays = atBottom();
  if (answer.reasoning) {
    answer.thought.hidden = false;
    answer.thought.lastChild.textContent = answer.reasoning;
  }
  render(answer.text, answer.content);
  if (stays) chat.scrollTop = chat.scrollHeight;
}

function body() {
  const system = $("system").value.trim();
  const asked = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
  };
  if ($("max_tokens").value) asked.max_tokens = Number($("max_tokens").value);
  return JSON.stringify(asked);
}

function take(answer, event) {
  if (event.error) throw new Error(event.error.message);
  for (const choice of event.choices) {
    answer.reasoning += choice.delta.reasoning_content || "";
    answer.content += choice.delta.content || "";
  }
  if (event.usage && event.timings) {
    const { usage, timings } = event;
    answer.note.textContent =
      `${usage.prompt_tokens} tokens read (${usage.prompt_tokens_details.cached_tokens} cached) in ` +
      `${Math.round(timings.prompt_ms)} ms, ${usage.completion_tokens} written at ` +
      `${timings.predicted_per_second.toFixed(1)} t/s`;
  }
}

async function follow(answer, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: body(), signal,
  });
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new Error(found ? found.error.message : `status ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ") && event !== "data: [DONE]") take(answer, JSON.parse(event.slice(6)));
    }
    show(answer);
  }
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  addTurn("user").text.textContent = text;
  messages.push({ role: "user", content: text });
  const asked = messages;
  const answer = addTurn("assistant");
  chat.scrollTop = chat.scrollHeight;
  const controller = new AbortController();
  setRunning(controller);
  try {
    await follow(answer, controller.signal);
  } catch (error) {
    answer.note.textContent = controller.signal.aborted ? "stopped" : error.message;
    answer.note.classList.toggle("error", !controller.signal.aborted);
  }
  if (answer.content) asked.push({ role: "assistant", content: answer.content });
  else asked.pop();
  show(answer);
  setRunning(null);
  $("prompt").focus();
}

async function greet() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const found = await response.json();
    $("model").textContent = response.ok
      ? `${found.data[0].id} on ${found.data[0].meta.target}, ${found.data[0].meta.weights} weights`
      : found.error.message;
    if (response.status === 503) setTimeout(greet, 2000);
  } catch {
    $("model").textContent = "the server does not answer";
    setTimeout(greet, 2000);
  }
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  chat.replaceChildren();
  $("prompt").focus();
});
$("key").addEventListener("change", greet);
greet();
