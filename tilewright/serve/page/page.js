// The chat page: asks this server and no other. What a model says only ever becomes text nodes.

import { copyButton, make, render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const chat = $("chat"), turns = $("turns"), prompt = $("prompt"), settings = $("settings");

let messages = []; // those the model has read or written, without the system message
let images = []; // data: URLs of images that go with the next message
let takesImages = false; // whether the model does
let running = null; // the AbortController of the answer that is being written
let longest = 0; // positions of a sequence
let follows = true; // whether the chat scrolls along with what is written
let scrolledTo = 0;

const seconds = (ms) => (ms < 9950 ? `${(ms / 1000).toFixed(ms < 995 ? 2 : 1)} s` : `${Math.round(ms / 1000)} s`);
const number = (value) => value.toLocaleString("en");
const tokens = (count) => `${number(count)} ${count === 1 ? "token" : "tokens"}`;

function headers() {
  const found = { "content-type": "application/json" };
  if ($("key").value) found.authorization = `Bearer ${$("key").value}`;
  return found;
}

function body() {
  const system = $("system").value.trim();
  const request = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    timings: true,
  };
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if ($(name).value && $(name).validity.valid) request[name] = Number($(name).value);
  }
  return JSON.stringify(request);
}

// --- turns ---------------------------------------------------------------------------------------

function addUser(text, pictures) {
  const turn = make("article", "turn user");
  if (pictures.length) turn.append(thumbnails(pictures));
  turn.append(make("div", "text", text));
  turns.append(turn);
  return turn;
}

function addAnswer(question) {
  const turn = make("article", "turn assistant");
  const thought = make("details", "thought");
  thought.hidden = true;
  thought.append(make("summary"), make("div"));
  const text = make("div", "text waits");
  const tools = make("div", "tools");
  const note = make("span", "note dim");
  const again = make("button", "quiet", "Again");
  again.type = "button";
  tools.append(note);
  turn.append(thought, text, tools);
  turns.append(turn);
  const answer = {
    turn, thought, text, tools, note, again, question,
    reasoning: "", content: "", started: performance.now(), first: 0, thoughtFor: 0, drawn: 0,
  };
  again.addEventListener("click", () => askAgain(answer));
  return answer;
}

function draw(answer) {
  answer.drawn = 0;
  if (answer.reasoning) {
    answer.thought.hidden = false;
    const isOver = answer.thoughtFor || !running;
    answer.thought.firstChild.textContent = isOver ? `Thought for ${seconds(answer.thoughtFor)}` : "Thinking …";
    answer.thought.lastChild.textContent = answer.reasoning.trim();
  }
  render(answer.text, answer.content);
  answer.text.classList.toggle("waits", Boolean(running) && !answer.content);
  answer.text.classList.toggle("writes", Boolean(running) && Boolean(answer.content));
  if (follows) chat.scrollTop = chat.scrollHeight;
}

// At most once a frame, however fast the pieces come; hidden pages have no frames, but a timer.
function drawSoon(answer) {
  if (answer.drawn) return;
  answer.drawn = document.hidden ? setTimeout(draw, 250, answer) : requestAnimationFrame(() => draw(answer));
}

function finish(answer, said, isError) {
  const now = performance.now();
  if (answer.reasoning && !answer.thoughtFor) answer.thoughtFor = now - answer.started;
  if (said) answer.note.textContent = said;
  answer.note.classList.toggle("error", isError);
  if (answer.content) answer.tools.prepend(copyButton(() => answer.content));
  answer.tools.insertBefore(answer.again, answer.note);
  draw(answer);
}

// --- asking --------------------------------------------------------------------------------------

function take(answer, event) {
  if (event.error) throw new Error(event.error.message);
  for (const { delta, finish_reason: reason } of event.choices) {
    const { reasoning_content: reasoning = "", content = "" } = delta;
    if ((reasoning || content) && !answer.first) answer.first = performance.now();
    answer.reasoning += reasoning || "";
    answer.content += content || "";
    if (answer.content && answer.reasoning && !answer.thoughtFor) answer.thoughtFor = performance.now() - answer.started;
    if (reason === "length") answer.isCut = true;
  }
  if (event.usage && event.timings) answer.note.textContent = figures(answer, event.usage, event.timings);
}

function figures(answer, usage, timings) {
  const cached = usage.prompt_tokens_details?.cached_tokens || 0;
  const read = `${tokens(usage.prompt_tokens)} read${cached ? `, ${number(cached)} of them cached` : ""}`;
  const parts = [read, `first text after ${seconds((answer.first || performance.now()) - answer.started)}`];
  parts.push(`${tokens(usage.completion_tokens)} at ${timings.predicted_per_second.toFixed(1)} t/s`);
  if (answer.isCut) parts.push("cut short");
  if (longest) $("room").textContent = `${number(usage.prompt_tokens + usage.completion_tokens)} of ${number(longest)} positions used`;
  return parts.join(" · ");
}

async function follow(answer, signal) {
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: body(), signal });
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new Error(found?.error?.message || `the server answered with status ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffered = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server went away in the middle of the answer");
    const events = (buffered + value).split("\n\n");
    buffered = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) take(answer, JSON.parse(event.slice(6)));
    }
    drawSoon(answer);
  }
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  turns.setAttribute("aria-busy", String(controller !== null));
}

// Asks for the answer to `messages`, the last of which is the user's.
async function ask(question) {
  const conversation = messages;
  const answer = addAnswer(question);
  follows = true;
  chat.scrollTop = chat.scrollHeight;
  const controller = new AbortController();
  setRunning(controller);
  $("said").textContent = "";
  let said = "", isError = false;
  try {
    await follow(answer, controller.signal);
  } catch (error) {
    isError = !controller.signal.aborted;
    said = isError ? error.message : `stopped after ${seconds(performance.now() - answer.started)}`;
    if (error instanceof TypeError && isError) said = "the server does not answer";
  }
  cancelAnimationFrame(answer.drawn);
  clearTimeout(answer.drawn);
  if (answer.content && !isError) conversation.push({ role: "assistant", content: answer.content });
  if (conversation !== messages) return; // another chat has begun meanwhile
  setRunning(null);
  finish(answer, said, isError);
  $("said").textContent = isError ? `Error: ${said}` : `Answer: ${answer.content || "none"}`;
  if (isError) greet();
}

function thumbnails(urls) {
  const box = make("div", "images");
  urls.forEach((url, at) => {
    const picture = box.appendChild(make("img"));
    picture.src = url;
    picture.alt = `image ${at + 1}`;
  });
  return box;
}

function contentOf(text, pictures) {
  if (!pictures.length) return text;
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...parts, { type: "text", text }];
}

const readFile = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.addEventListener("load", () => resolve(reader.result));
  reader.addEventListener("error", () => reject(reader.error));
  reader.readAsDataURL(file);
});

// Images that were dropped or pasted. The server has the limits and says so.
async function addFiles(files) {
  const found = [...files].filter((file) => file.type.startsWith("image/"));
  if (!found.length) return;
  if (!takesImages) { $("room").textContent = "This model takes no images."; return; }
  images.push(...await Promise.all(found.map(readFile)));
  showImages();
  prompt.focus();
}

function showImages() {
  const box = $("images");
  box.hidden = !images.length;
  box.replaceChildren(...thumbnails(images).childNodes);
  fit();
}

function send(text) {
  text = text.trim();
  if ((!text && !images.length) || running) return;
  if (messages.at(-1)?.role === "user") { // it was never answered: the next one takes its place
    messages.pop();
    [...turns.querySelectorAll(".user")].at(-1)?.classList.add("dropped");
  }
  prompt.value = "";
  const pictures = images;
  images = [];
  showImages();
  $("empty").hidden = true;
  messages.push({ role: "user", content: contentOf(text, pictures) });
  ask({ turn: addUser(text, pictures), at: messages.length, pictures });
}

// The same question once more; what came behind it is left.
function askAgain({ question }) {
  if (running) return;
  const text = question.turn.querySelector(".text").textContent;
  messages = messages.slice(0, question.at - 1);
  messages.push({ role: "user", content: contentOf(text, question.pictures) });
  question.turn.classList.remove("dropped");
  while (question.turn.nextSibling) question.turn.nextSibling.remove();
  prompt.focus();
  ask({ ...question, at: messages.length });
}

function begin() {
  const before = running;
  messages = [];
  images = [];
  showImages();
  if (before) before.abort();
  setRunning(null);
  turns.replaceChildren();
  $("empty").hidden = false;
  $("room").textContent = "Enter sends, Shift+Enter is a new line, Esc stops.";
  prompt.focus();
}

// --- the page ------------------------------------------------------------------------------------

async function greet() {
  const model = $("model");
  let said = "the server does not answer", state = "error";
  try {
    const response = await fetch("v1/models", { headers: headers() });
    const found = await response.json();
    if (response.ok) {
      const { id, meta, max_model_len: most } = found.data[0];
      longest = most || 0;
      takesImages = (meta?.modalities || []).includes("image");
      said = `${id} · ${[meta?.precision, meta?.target].filter(Boolean).join(" on ")}`;
      if (meta?.weights === "random") said += " · random weights";
      state = "ready";
      document.title = `${id} · Tilewright`;
    } else {
      said = found.error.message;
      if (response.status === 503) state = "waiting";
      if (response.status === 401) said = "this server wants an API key: see the settings";
    }
  } catch {
    // it is said that the server does not answer
  }
  model.textContent = model.title = said;
  model.dataset.state = state;
  if (state !== "ready") setTimeout(greet, 2000);
}

function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  $("send").disabled = !prompt.value.trim() && !images.length;
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); send(prompt.value); });
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(prompt.value);
  }
});
prompt.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) { event.preventDefault(); addFiles(event.clipboardData.files); }
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); addFiles(event.dataTransfer.files); });
$("images").addEventListener("click", (event) => {
  const at = [...$("images").childNodes].indexOf(event.target);
  if (at >= 0) { images.splice(at, 1); showImages(); prompt.focus(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !settings.open) running.abort();
});
$("stop").addEventListener("click", () => { running?.abort(); prompt.focus(); });
$("clear").addEventListener("click", begin);
$("ideas").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") { send(event.target.textContent); prompt.focus(); }
});
$("open-settings").addEventListener("click", () => settings.showModal());
settings.addEventListener("click", (event) => { if (event.target === settings) settings.close(); });
settings.addEventListener("close", () => { greet(); prompt.focus(); });
$("theme").addEventListener("change", () => { document.documentElement.style.colorScheme = $("theme").value; });
chat.addEventListener("scroll", () => {
  const isAtEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 80;
  if (isAtEnd) follows = true;
  else if (chat.scrollTop < scrolledTo) follows = false; // only a reader scrolls back
  scrolledTo = chat.scrollTop;
  $("to-end").hidden = isAtEnd || !messages.length;
});
$("to-end").addEventListener("click", () => { follows = true; chat.scrollTop = chat.scrollHeight; });
fit();
greet();
