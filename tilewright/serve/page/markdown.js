// Markdown as far as models write it, into nodes of the page. Every character of the text ends in a
// text node; the only attributes set are class names and the address of http links.

const MOST_NESTED = 6; // deeper lists, quotes and marks stay as they are written
const FARTHEST = 4000; // characters between a mark and its end, so that no text takes long

export function make(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

// Shows `text` in `parent`. Blocks that are as they were at the last call keep their nodes, so that
// what is selected or focused in them stays so while the rest is being written.
export function render(parent, text) {
  const old = parent.blocks || [];
  const blocks = split(text.split("\n"));
  let same = 0;
  while (same < blocks.length && same < old.length && old[same] === blocks[same].source) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const block of blocks.slice(same)) parent.append(build(block, 0));
  parent.blocks = blocks.map((block) => block.source);
}

const indentOf = (line) => line.length - line.trimStart().length;

function fenceOf(line) {
  const found = /^ {0,3}(`{3,}|~{3,})([^`]*)$/.exec(line);
  return found && { mark: found[1], language: found[2].trim().split(/\s/)[0], indent: indentOf(line) };
}

function itemOf(line) {
  const found = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+(.*))?$/.exec(line);
  if (!found || isRule(line)) return null;
  const [, before, mark, rest = ""] = found;
  const kind = /\d/.test(mark) ? "ol" : "ul";
  return { kind, mark, rest, indent: before.length, inner: before.length + mark.length + 1 };
}

const isRule = (line) => /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/\s/g, ""));
const headingOf = (line) => /^ {0,3}(#{1,6})\s+(\S.*)$/.exec(line);
const begins = (line) =>
  Boolean(fenceOf(line) || headingOf(line) || itemOf(line) || isRule(line) || line.startsWith(">"));

function cellsOf(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return trimmed.split("|").map((cell) => cell.trim());
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const cells = cellsOf(lines[at + 1]);
  return cells.every((cell) => /^:?-+:?$/.test(cell)) && cells.length === cellsOf(lines[at]).length;
}

// Lines into blocks: {kind, lines, source, ...}.
function split(lines) {
  const blocks = [];
  let at = 0;
  const take = (kind, end, more = {}) => {
    const taken = lines.slice(at, end);
    blocks.push({ kind, lines: taken, source: `${kind}\n${taken.join("\n")}`, ...more });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = fenceOf(line);
    if (!line.trim()) at += 1;
    else if (fence) take("code", endOfCode(lines, at, fence), fence);
    else if (headingOf(line)) take("heading", at + 1);
    else if (isRule(line)) take("hr", at + 1);
    else if (line.startsWith(">")) take("quote", endWhere(lines, at, (each) => !each.startsWith(">")));
    else if (itemOf(line)) take(itemOf(line).kind, endOfList(lines, at));
    else if (isTable(lines, at)) take("table", endWhere(lines, at, (each) => !each.includes("|")));
    else take("p", endWhere(lines, at, (each, n) => !each.trim() || begins(each) || isTable(lines, n)));
  }
  return blocks;
}

function endWhere(lines, at, isEnd) {
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end], end)) end += 1;
  return end;
}

function endOfCode(lines, at, fence) {
  const end = endWhere(lines, at, (each) => {
    const trimmed = each.trim();
    return trimmed.startsWith(fence.mark) && trimmed === fence.mark[0].repeat(trimmed.length);
  });
  return Math.min(end + 1, lines.length);
}

// A list goes on through items of its kind, what is indented, and blank lines before either.
function endOfList(lines, at) {
  const first = itemOf(lines[at]);
  let end = at + 1;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next], item = itemOf(line);
    if (!line.trim()) continue;
    const isBelow = indentOf(line) > first.indent;
    const goesOn = next === end && !begins(line);
    if (!isBelow && !(item && item.kind === first.kind) && !goesOn) break;
    end = next + 1;
  }
  return end;
}

function build(block, depth) {
  const { kind, lines } = block;
  if (kind === "code") return buildCode(block);
  if (kind === "hr") return make("hr");
  if (kind === "table") return buildTable(lines);
  if (kind === "heading") {
    const [, marks, text] = headingOf(lines[0]);
    const node = make(`h${Math.min(marks.length + 1, 4)}`);
    addInline(node, text, 0);
    return node;
  }
  if (depth >= MOST_NESTED || kind === "p") {
    const node = make("p");
    addInline(node, lines.join("\n"), 0);
    return node;
  }
  if (kind === "quote") {
    return buildAll(make("blockquote"), lines.map((line) => line.replace(/^> ?/, "")), depth);
  }
  return buildList(kind, lines, depth);
}

function buildAll(parent, lines, depth) {
  for (const block of split(lines)) parent.append(build(block, depth + 1));
  return parent;
}

function buildList(kind, lines, depth) {
  const list = make(kind), first = itemOf(lines[0]);
  if (kind === "ol") list.start = parseInt(first.mark, 10);
  let item = null, own = [];
  const close = () => {
    if (!item) return;
    const node = list.appendChild(make("li"));
    const only = own.every((line) => line.trim() && !begins(line));
    if (only) addInline(node, own.join("\n"), 0);
    else buildAll(node, own, depth);
  };
  for (const line of lines) {
    const found = itemOf(line);
    if (found && found.indent <= first.indent + 1) {
      close();
      item = found;
      own = [found.rest];
    } else own.push(line.slice(Math.min(indentOf(line), item.inner)));
  }
  close();
  return list;
}

function buildCode({ lines, language, indent, mark }) {
  const last = lines[lines.length - 1].trim();
  const isClosed = lines.length > 1 && last.startsWith(mark) && last === mark[0].repeat(last.length);
  const own = lines.slice(1, isClosed ? -1 : undefined);
  const text = own.map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  const box = make("div", "code"), bar = box.appendChild(make("div"));
  bar.append(make("span", "", language || "text"), copyButton(() => text));
  const pre = box.appendChild(make("pre"));
  pre.tabIndex = 0; // long lines are scrolled with the keyboard
  pre.append(make("code", "", text));
  return box;
}

function buildTable(lines) {
  const box = make("div", "table"), table = box.appendChild(make("table"));
  const sides = cellsOf(lines[1]).map((cell) => {
    if (!cell.endsWith(":")) return "";
    return cell.startsWith(":") ? "center" : "right";
  });
  const addRow = (parent, line, tag) => {
    const row = parent.appendChild(make("tr")), cells = cellsOf(line);
    sides.forEach((side, n) => addInline(row.appendChild(make(tag, side)), cells[n] || "", 0));
  };
  addRow(table.appendChild(make("thead")), lines[0], "th");
  const body = table.appendChild(make("tbody"));
  for (const line of lines.slice(2)) addRow(body, line, "td");
  return box;
}

export function copyButton(text) {
  const button = make("button", "quiet", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    const isDone = await copy(text());
    button.textContent = isDone ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

// The clipboard is only there on https and on this machine; elsewhere a hidden field does it.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.body.appendChild(make("textarea", "hidden"));
    field.value = text;
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    return isDone;
  }
}

const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const isWord = (letter) => letter !== undefined && /[\p{L}\p{N}]/u.test(letter);

// Marks inside a block: code, bold, italics, struck, links. What is left open stays as written.
function addInline(parent, text, depth) {
  let from = 0, at = 0;
  const put = (node, end) => {
    if (at > from) parent.append(text.slice(from, at));
    parent.append(node);
    from = at = end;
  };
  while (at < text.length) {
    const found = depth < MOST_NESTED && "`*_~[\\h".includes(text[at]) && inlineAt(text, at, depth);
    if (found) put(found.node, found.end);
    else at += text[at] === "`" ? /^`+/.exec(text.slice(at, at + FARTHEST))[0].length : 1;
  }
  if (from < text.length) parent.append(text.slice(from));
}

function inlineAt(text, at, depth) {
  if (text[at] === "\\") {
    const isMark = "\\`*_~[]()#>|-".includes(text[at + 1] || " ");
    return isMark ? { node: document.createTextNode(text[at + 1]), end: at + 2 } : null;
  }
  if (text[at] === "`") return codeAt(text, at);
  if (text[at] === "[") return linkAt(text, at, depth);
  if (text[at] === "h") return addressAt(text, at);
  for (const [mark, tag] of MARKS) {
    if (text.startsWith(mark, at)) return markAt(text, at, mark, tag, depth);
  }
  return null;
}

function codeAt(text, at) {
  const near = text.slice(at, at + FARTHEST);
  const mark = /^`+/.exec(near)[0];
  let end = mark.length;
  for (;;) {
    end = near.indexOf(mark, end);
    if (end < 0) return null;
    if (near[end + mark.length] !== "`" && near[end - 1] !== "`") break;
    while (near[end] === "`") end += 1;
  }
  const inner = near.slice(mark.length, end);
  const own = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ") ? inner.slice(1, -1) : inner;
  return { node: make("code", "", own), end: at + end + mark.length };
}

function markAt(text, at, mark, tag, depth) {
  const size = mark.length, isLow = mark[0] === "_";
  if (!text[at + size] || /\s/.test(text[at + size]) || (isLow && isWord(text[at - 1]))) return null;
  const near = text.slice(at, at + FARTHEST);
  let end = size;
  for (let tries = 0; tries < 20; tries += 1) {
    end = near.indexOf(mark, end + 1);
    if (end < 0) return null;
    const isDouble = size === 1 && (near[end + 1] === mark || near[end - 1] === mark);
    if (!isDouble && !/\s/.test(near[end - 1]) && !(isLow && isWord(near[end + size]))) break;
    if (isDouble) end += 1;
    if (tries === 19) return null;
  }
  const node = make(tag);
  addInline(node, near.slice(size, end), depth + 1);
  return { node, end: at + end + size };
}

function link(address, text, depth) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return null;
  const node = make("a");
  node.href = url.href;
  node.title = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  if (text === address) node.textContent = text;
  else addInline(node, text, depth + 1);
  return node;
}

function linkAt(text, at, depth) {
  const found = /^\[([^[\]\n]{1,500})\]\((\S{1,2000}?)\)/.exec(text.slice(at, at + 2600));
  const node = found && link(found[2], found[1], MOST_NESTED);
  return node ? { node, end: at + found[0].length } : null;
}

function addressAt(text, at) {
  if (isWord(text[at - 1]) || !/^https?:\/\//.test(text.slice(at, at + 8))) return null;
  const found = /^[^\s<>"'`|]+/.exec(text.slice(at, at + 2000))[0].replace(/[.,:;!?)\]*_]+$/, "");
  const node = link(found, found, MOST_NESTED);
  return node ? { node, end: at + found.length } : null;
}
