/* Nodes, and numbers as text. */

const SVG = "http://www.w3.org/2000/svg";

/* Text from files only ever becomes text nodes and attributes of known names. */
function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

const int = (n) => n.toLocaleString("en-US");
const counted = (n, one, many = `${one}s`) => `${int(n)} ${n === 1 ? one : many}`;
const images = (n) => counted(n, "image");
const size = (b) => `${b[0]}×${b[1]}`;
const percent = (x) => (x === 0 ? "0%" : x < 0.001 ? "<0.1%" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`);
const cutOff = (count, mean, worst) => `${images(count)}, ${percent(mean)} cut off${count > 1 ? ` on average, ${percent(worst)} at worst` : ""}`;
const lossClass = (x) => (x > 0.2 ? "bad" : x > 0.1 ? "warn" : "");
const dotClass = (x) => (x < 0 ? "none" : x < 0.05 ? "low" : x < 0.15 ? "mid" : "high");
const RATIOS = [[1, 4], [1, 3], [2, 5], [1, 2], [9, 16], [2, 3], [3, 4], [4, 5], [1, 1], [5, 4], [4, 3], [3, 2], [16, 9], [2, 1], [5, 2], [3, 1], [4, 1]];

const onPhone = matchMedia("(max-width: 620px)"), LONG = new Set(["sizes", "buckets", "folders"]);

/* A part of the page with a heading that can be linked to. On a phone, the long ones are folded at first. */
function section(id, title, ...children) {
  const heading = `${id}-title`, fold = h("button", { type: "button", class: "fold", onclick: () => setFolded(part, !part.classList.contains("folded")) });
  const part = h("section", { class: "panel", id, "aria-labelledby": heading },
    h("h2", { id: heading }, title, h("a", { class: "anchor", href: `#${id}`, "aria-label": `Link to ${title}` }, "#"), fold), children);
  setFolded(part, onPhone.matches && LONG.has(id));
  return part;
}

function setFolded(part, folded) {
  const fold = part.querySelector(".fold");
  part.classList.toggle("folded", folded);
  fold.textContent = folded ? "Show" : "Hide";
  fold.setAttribute("aria-expanded", String(!folded));
  if (!folded && part.isConnected) window.dispatchEvent(new Event("resize")); // what is drawn to a width has one now
}

/* Buttons of which one is chosen, the first at once; `choose(option)` is told, and each option has a `name`. */
function choice(label, options, choose) {
  const buttons = options.map((option) => h("button", { type: "button", onclick: () => show(option) }, option.name));
  const show = (option) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i] === option)));
    choose(option);
  };
  show(options[0]);
  return h("div", { class: "tabs", role: "group", "aria-label": label }, h("span", { "aria-hidden": "true" }, `${label}:`), buttons);
}

/* A table that is wider than a narrow page scrolls by itself: by the keyboard too. */
const scrolling = (label, ...children) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, children);

/* What explains a part, behind a mark that opens it. */
const help = (about, ...children) => h("details", { class: "help" }, h("summary", { "aria-label": about }, "?"), h("div", { class: "soft" }, children));

/* A text with a button beside each command in it, which copies it. */
const withCommands = (text) => text.split(/`(kohya-bucket[^`]*)`/).map((part, i) => (i % 2 ? chip(part) : part));
function chip(command) {
  const code = h("code", {}, command), says = h("span", { role: "status", class: "unseen" });
  const button = h("button", { type: "button", "aria-label": `Copy ${command}`, onclick: async () => {
    const copied = await copy(command, code);
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
    says.textContent = copied ? "Copied" : "It is selected: press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; says.textContent = ""; }, 2000);
  } }, "Copy");
  return h("span", { class: "chip" }, code, button, says);
}

/* Whether a text is on the clipboard now. Where a browser does not allow that, `node`, which shows it, is selected. */
async function copy(text, node) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(node);
    return document.execCommand("copy");
  }
}

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
function bringIntoView(node, block) {
  for (let part = node.closest("details:not([open])"); part; part = part.parentElement.closest("details:not([open])")) part.open = true;
  for (let part = node.closest("section.panel.folded"); part; part = part.parentElement.closest("section.panel.folded")) setFolded(part, false);
  node.scrollIntoView({ block, behavior: calm() ? "auto" : "smooth" });
}
const goToHash = () => { const to = location.hash && document.getElementById(location.hash.slice(1)); if (to) bringIntoView(to, "start"); };
window.addEventListener("hashchange", goToHash);

const mark = () => h("img", { class: "mark", src: document.querySelector("link[rel=icon]").href, alt: "" });

function shapeOf(bucket) {
  const unit = 18 / Math.max(bucket[0], bucket[1]);
  const w = Math.max(2, bucket[0] * unit), height = Math.max(2, bucket[1] * unit);
  return s("svg", { class: "shape", viewBox: "0 0 24 22", "aria-hidden": "true" }, s("rect", { x: 12 - w / 2, y: 11 - height / 2, width: w, height }));
}

function themeButton() {
  const root = document.documentElement, names = ["auto", "light", "dark"];
  let now = 0;
  const button = h("button", { type: "button", class: "theme", onclick: () => { now = (now + 1) % 3; apply(); } });
  const apply = () => {
    if (now) root.dataset.theme = names[now]; else delete root.dataset.theme;
    button.textContent = `Colours: ${names[now]}`;
  };
  apply();
  return button;
}
