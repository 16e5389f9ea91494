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
const images = (n) => `${int(n)} ${n === 1 ? "image" : "images"}`;
const size = (b) => `${b[0]}×${b[1]}`;
const percent = (x) => (x === 0 ? "0%" : x < 0.001 ? "<0.1%" : `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%`);
const lossClass = (x) => (x > 0.2 ? "bad" : x > 0.1 ? "warn" : "");
const dotClass = (x) => (x < 0 ? "none" : x < 0.05 ? "low" : x < 0.15 ? "mid" : "high");
const RATIOS = [[1, 4], [1, 3], [2, 5], [1, 2], [9, 16], [2, 3], [3, 4], [4, 5], [1, 1], [5, 4], [4, 3], [3, 2], [16, 9], [2, 1], [5, 2], [3, 1], [4, 1]];

const onPhone = matchMedia("(max-width: 620px)"), LONG = new Set(["sizes", "buckets", "sheets", "images", "folders"]);

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

/* A table that is wider than a narrow page scrolls by itself: by the keyboard too. */
const scrolling = (label, ...children) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, children);

const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
function bringIntoView(node, block) {
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
