// A model's Markdown as elements: headings, lists, quotes, code, bold, italic. Everything else stays the text it is, and
// links are text with their address, so that nothing a model writes can be clicked or loaded.
import { el } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_ROW = /^ {0,3}\|.*\|\s*$/;
const MAX_DEPTH = 8; // of lists and quotes in each other; deeper ones are text
// Bounded spans: a marker that nobody closes must not cost a look at all the text behind it.
const INLINE = new RegExp(
  [
    /(?<ticks>`+)(?<code>[^`][^]{0,2000}?)\k<ticks>(?!`)/,
    /\*\*(?=\S)(?<bold>[^]{0,2000}?\S)\*\*(?!\*)|(?<!\w)__(?=\S)(?<bold2>[^]{0,2000}?\S)__(?!\w)/,
    /\*(?![\s*])(?<italic>[^]{0,2000}?[^\s*])\*(?!\*)|(?<!\w)_(?![\s_])(?<italic2>[^]{0,2000}?[^\s_])_(?!\w)/,
    /!?\[(?<label>[^\]\n]{1,500})\]\((?<address>[^)\s]{1,2000})[^)\n]{0,500}\)/,
    /\\(?<escaped>[!-/:-@[-`{-~])/,
  ].map((part) => part.source).join("|"),
);
const OPEN = /^([^]*?)(\*\*|`+)(?!\s)([^]*)$/; // a marker whose end may still come

/** Shows a text that grows. Only what changed is touched, so that nothing flickers and selections stay. */
export class Markdown {
  constructor(view) {
    this.view = view;
    this.shown = []; // the blocks' sources, one a child
  }

  /** isGrowing: more is to come, so a bold or code span that is still open is shown as what it will probably be. */
  show(text, isGrowing = false) {
    const blocks = split(text.split("\n"));
    blocks.forEach((block, i) => {
      const isOpen = isGrowing && i === blocks.length - 1;
      const source = `${isOpen} ${block.kind} ${block.lines.join("\n")}`;
      if (this.shown[i] === source) return;
      this.shown[i] = source;
      const node = build(block, isOpen);
      const old = this.view.children[i];
      if (old) patch(old, node);
      else this.view.append(node);
    });
    this.shown.length = blocks.length;
    while (this.view.children.length > blocks.length) this.view.lastElementChild.remove();
  }
}

/** Turn one tree into the other by as few changes as a stream's growth needs. */
function patch(old, wanted) {
  if (old.nodeType === Node.TEXT_NODE && wanted.nodeType === Node.TEXT_NODE) {
    if (wanted.data.startsWith(old.data)) old.appendData(wanted.data.slice(old.data.length));
    else old.data = wanted.data;
  } else if (old.nodeName !== wanted.nodeName || old.start !== wanted.start) {
    old.replaceWith(wanted);
  } else {
    const children = [...wanted.childNodes];
    while (old.childNodes.length > children.length) old.lastChild.remove();
    children.forEach((child, i) => (old.childNodes[i] ? patch(old.childNodes[i], child) : old.append(child)));
  }
}

/** The text's blocks: what kind, and which lines. */
function split(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const first = i++;
    if (!line.trim()) continue;
    const take = (goesOn) => { while (i < lines.length && goesOn(lines[i], i)) i++; };
    let kind = "text";
    const fence = FENCE.exec(line);
    const item = ITEM.exec(line);
    if (fence) {
      kind = "code";
      const isEnd = (other) => other.trim().startsWith(fence[1]) && !other.trim().replaceAll(fence[1][0], "");
      take((other) => !isEnd(other));
      i = Math.min(i + 1, lines.length); // and the end itself
    } else if (HEADING.test(line)) kind = "heading";
    else if (RULE.test(line)) kind = "rule";
    else if (QUOTE.test(line)) {
      kind = "quote";
      take((other) => QUOTE.test(other));
    } else if (TABLE_ROW.test(line)) {
      kind = "table";
      take((other) => TABLE_ROW.test(other));
    } else if (item) {
      kind = "list";
      take((other, at) => belongs(other, lines[at + 1], item));
    } else {
      take((other) => other.trim() && !FENCE.test(other) && !HEADING.test(other) && !RULE.test(other) && !ITEM.test(other) && !QUOTE.test(other) && !TABLE_ROW.test(other));
    }
    blocks.push({ kind, lines: lines.slice(first, i) });
  }
  return blocks;
}

/** Whether a line goes on with the list that began with an item. */
function belongs(line, next, item) {
  const indent = item[1].length;
  if (!line.trim()) return next !== undefined && (isMore(next, item) || /^\s+\S/.test(next));
  if (/^\s*/.exec(line)[0].length > indent || isMore(line, item)) return true;
  return !ITEM.test(line) && !HEADING.test(line) && !FENCE.test(line) && !RULE.test(line); // a line that runs on
}

/** Whether a line is an item of the same list. */
function isMore(line, item) {
  const other = ITEM.exec(line);
  return Boolean(other) && !RULE.test(line) && isNumbered(other) === isNumbered(item);
}

const isNumbered = (item) => /\d/.test(item[2]);

function build({ kind, lines }, isOpen, depth = 0) {
  const within = (inner) => split(inner).map((block, i, all) => build(block, isOpen && i === all.length - 1, depth + 1));
  if (kind === "code") {
    const isClosed = lines.length > 1 && FENCE.test(lines.at(-1));
    return el("pre", {}, el("code", {}, lines.slice(1, isClosed ? -1 : undefined).join("\n")));
  }
  if (kind === "table") return el("pre", {}, lines.join("\n"));
  if (kind === "rule") return el("hr");
  if (kind === "heading") {
    const [, marks, words] = HEADING.exec(lines[0]);
    return el(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(words, isOpen)); // under the card's own h2
  }
  if (depth < MAX_DEPTH && kind === "quote") return el("blockquote", {}, ...within(lines.map((line) => line.replace(QUOTE, ""))));
  if (depth < MAX_DEPTH && kind === "list") return list(lines, within);
  return el("p", {}, ...inline(lines.join("\n").trim(), isOpen));
}

function list(lines, within) {
  const first = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length + 1) items.push([item[4]]);
    else items.at(-1).push(line);
  }
  const nodes = items.map((item) => {
    const indent = Math.min(...item.slice(1).filter((line) => line.trim()).map((line) => /^\s*/.exec(line)[0].length));
    const children = within([item[0], ...item.slice(1).map((line) => line.slice(Math.min(indent, line.length)))]);
    // A single line needs no paragraph of its own.
    if (children[0]?.nodeName === "P") children.splice(0, 1, ...children[0].childNodes);
    return el("li", {}, ...children);
  });
  return isNumbered(first) ? el("ol", { start: parseInt(first[2], 10) }, ...nodes) : el("ul", {}, ...nodes);
}

/** Text and the spans in it, as nodes. */
function inline(text, isOpen) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    nodes.push(text.slice(0, found.index));
    const { code, bold, bold2, italic, italic2, label, address, escaped } = found.groups;
    if (code !== undefined) nodes.push(el("code", {}, code));
    else if (bold ?? bold2) nodes.push(el("strong", {}, ...inline(bold ?? bold2)));
    else if (italic ?? italic2) nodes.push(el("em", {}, ...inline(italic ?? italic2)));
    else if (label !== undefined) nodes.push(...inline(label), label === address ? "" : ` (${address})`);
    else nodes.push(escaped);
  }
  const open = isOpen ? OPEN.exec(text) : null;
  if (open) nodes.push(open[1], ...(open[3] ? [el(open[2][0] === "`" ? "code" : "strong", {}, open[3])] : []));
  else nodes.push(text);
  return nodes.filter((node) => node !== "");
}
