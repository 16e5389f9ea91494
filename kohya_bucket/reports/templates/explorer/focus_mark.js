/* The rectangle that is drawn over an image: by mouse, touch or keyboard. */

const MARK_HELP = "Draw a rectangle around what the crop is to keep, or click a point. Arrow keys move it, with Shift they resize it, Delete removes it.";
const LEAST_DRAWN = 4; // pixels on the page: less is a click
const FIRST_BOX = [0.25, 0.25, 0.75, 0.75];
const KEY_STEP = 0.01;

/* A rectangle or point over a box that shows all of an image. */
function markedBox(box, attributes) {
  const node = h("span", { class: `marked${isPoint(box) ? " point" : ""}`, ...attributes });
  ["left", "top"].forEach((side, i) => { node.style[side] = `${100 * box[i]}%`; });
  ["width", "height"].forEach((side, i) => { node.style[side] = `${100 * (box[i + 2] - box[i])}%`; });
  return node;
}

class FocusMark {
  /* `changed(box, done)` is called while the rectangle changes, and once it has. */
  constructor(changed) {
    this.changed = changed;
    this.area = h("div", { class: "mark-area", onpointerdown: (event) => this.begin(event), onpointermove: (event) => this.drag?.(event), onpointerup: () => { this.click?.(); this.end(); }, onpointercancel: () => this.end() });
    this.button = h("button", { type: "button", id: "mark", onclick: () => { this.set(this.box ? null : FIRST_BOX, true); if (this.box) this.node.focus(); } });
    this.tools = h("div", { class: "tools" }, this.button, h("span", { class: "soft", id: "mark-help" }, MARK_HELP));
  }

  /* Lies over a preview of an image with this rectangle or null. */
  over(figure, box) {
    const frame = figure.querySelector(".frame");
    for (const side of ["width", "height"]) this.area.style[side] = frame.style[side];
    this.drag = this.open = this.click = null;
    figure.prepend(this.area);
    figure.after(this.tools);
    this.draw(box);
  }

  draw(box) {
    const percents = (from, to) => [...new Set([from, to].map((share) => Math.round(100 * share)))].join(" to ") + "%", held = this.node && this.node === document.activeElement;
    this.box = box;
    this.button.textContent = box ? "Remove the focus" : "Mark the focus";
    this.node = box && markedBox(box, { role: "application", tabindex: "0", "aria-describedby": "mark-help", "aria-label": `Focus: ${percents(box[0], box[2])} across, ${percents(box[1], box[3])} down`, onkeydown: (event) => this.key(event) });
    if (box && !isPoint(box)) this.node.append(...[[0, 1], [2, 1], [0, 3], [2, 3]].map((corner) => h("i", { "data-corner": corner.join("") })));
    this.area.replaceChildren(...(box ? [this.node] : []));
    if (held) (this.node || this.button).focus();
  }

  set(box, done) {
    this.draw(box && box.map((share) => Math.round(between(share, 0, 1) * 1e5) / 1e5));
    this.changed(this.box, done);
  }

  moved(box, x, y) {
    const by = [between(x, -box[0], 1 - box[2]), between(y, -box[1], 1 - box[3])];
    return box.map((share, i) => share + by[i % 2]);
  }

  begin(event) {
    if (event.button !== 0 || !event.isPrimary) return;
    event.preventDefault(); // of marking text and of dragging a picture
    this.area.setPointerCapture(event.pointerId);
    const at = (one) => { const r = this.area.getBoundingClientRect(), tall = this.area; return [(one.clientX - r.left - tall.clientLeft) / tall.clientWidth, (one.clientY - r.top - tall.clientTop) / tall.clientHeight].map((share) => between(share, 0, 1)); };
    const { box, node } = this, corner = event.target.dataset.corner, from = at(event), inside = node && node.contains(event.target);
    // A corner turns about the one across; a new rectangle about where it was begun.
    const fixed = corner ? [box[2 - corner[0]], box[4 - corner[1]]] : from;
    let begun = Boolean(inside);
    if (inside) node.focus();
    // A click sets a point, or moves one; it takes no rectangle away.
    this.click = !inside && (!box || isPoint(box)) ? () => { this.set([...from, ...from], true); this.node.focus(); } : null;
    this.drag = (now) => {
      begun ||= Math.hypot(now.clientX - event.clientX, now.clientY - event.clientY) >= LEAST_DRAWN;
      if (!begun) return;
      const to = at(now);
      this.open = true;
      this.click = null;
      this.set(inside && !corner ? this.moved(box, to[0] - from[0], to[1] - from[1]) : [...[0, 1].map((i) => Math.min(fixed[i], to[i])), ...[0, 1].map((i) => Math.max(fixed[i], to[i]))], false);
    };
  }

  end() {
    if (!this.drag) return;
    this.drag = this.click = null;
    if (!this.open) return;
    this.open = false;
    this.changed(this.box, true);
    this.node.focus();
  }

  key(event) {
    const ways = { ArrowLeft: [-KEY_STEP, 0], ArrowRight: [KEY_STEP, 0], ArrowUp: [0, -KEY_STEP], ArrowDown: [0, KEY_STEP] }, way = ways[event.key], { box } = this;
    if ((!way && event.key !== "Delete") || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation(); // in the dialog, arrows go to other images
    if (!way) this.set(null, true);
    else this.set(event.shiftKey ? [box[0], box[1], Math.max(box[2] + way[0], box[0]), Math.max(box[3] + way[1], box[1])] : this.moved(box, ...way), true);
  }
}
