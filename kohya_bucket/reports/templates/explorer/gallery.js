/* Every image in its bucket, as a grid of which only what is in sight has nodes. */

const CELL = 152, GAP = 10, TEXT_TALL = 54, HEAD_TALL = 50, BOX = 140, BEYOND = 500;

/* An image's width and height on the page. */
const shownSize = (item) => [item.width, item.height].map((side) => Math.max(6, (side * BOX) / Math.max(item.width, item.height)));

class Gallery {
  /* `open(item)` is called when an image is chosen; `placed(item)` is its placement. */
  constructor(open, placed) {
    this.open = open;
    this.placed = placed;
    this.thumbs = new Thumbs();
    this.rows = [];
    this.nodes = new Map();
    this.at = { row: 0, column: 0 };
    this.root = h("div", { class: "gallery", role: "grid", "aria-label": "Images by bucket", tabindex: "-1", onkeydown: (event) => this.key(event), onfocusin: (event) => this.focused(event) });
    this.draw = atFrame(() => this.render());
    window.addEventListener("scroll", this.draw, { passive: true });
    window.addEventListener("resize", atFrame(() => this.show(this.sections)));
    this.sections = [];
  }

  /* `sections`: {id, title, about, items} from the top down. */
  show(sections) {
    this.sections = sections;
    const columns = Math.max(1, Math.floor(((this.root.clientWidth || 900) + GAP) / (CELL + GAP)));
    this.columns = columns;
    this.rows = [];
    let top = 0;
    for (const section of sections) {
      this.rows.push({ section, top, tall: HEAD_TALL });
      top += HEAD_TALL;
      for (let from = 0; from < section.items.length; from += columns) {
        const items = section.items.slice(from, from + columns), tall = Math.ceil(Math.max(...items.map((item) => shownSize(item)[1]))) + TEXT_TALL;
        this.rows.push({ section, top, tall, items });
        top += tall;
      }
    }
    this.root.style.height = `${top}px`;
    this.root.setAttribute("aria-rowcount", this.rows.length);
    this.root.setAttribute("aria-colcount", columns);
    for (const row of [...this.nodes.keys()]) this.drop(row);
    this.at = { row: 1, column: 0 };
    this.render();
  }

  drop(row) {
    const node = this.nodes.get(row);
    for (const box of node.querySelectorAll(".thumb")) this.thumbs.remove(box);
    node.remove();
    this.nodes.delete(row);
  }

  /* The first row that ends below `y`. */
  rowAt(y) {
    let low = 0, high = this.rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.rows[middle].top + this.rows[middle].tall > y) high = middle; else low = middle + 1;
    }
    return low;
  }

  render() {
    const above = -this.root.getBoundingClientRect().top, first = this.rowAt(above - BEYOND), last = this.rowAt(above + innerHeight + BEYOND);
    const held = document.activeElement;
    for (const [row, node] of this.nodes) if ((row < first || row > last) && row !== this.at.row && !node.contains(held)) this.drop(row);
    // The row to which the tab key leads is there, however far away.
    const wanted = [this.at.row, ...Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i)];
    for (const row of wanted) {
      if (this.nodes.has(row) || !this.rows[row]) continue;
      const node = this.rows[row].items ? this.cells(row) : this.head(row);
      this.nodes.set(row, node);
      // In the order of the rows, which is that of reading.
      const next = [...this.root.children].find((other) => +other.getAttribute("aria-rowindex") > row + 1);
      this.root.insertBefore(node, next || null);
    }
    this.tabStop();
  }

  place(row, cls, ...children) {
    const node = h("div", { role: "row", class: cls, "aria-rowindex": row + 1 }, children);
    node.style.transform = `translateY(${this.rows[row].top}px)`;
    return node;
  }

  head(row) {
    const { section } = this.rows[row];
    return this.place(row, "grid-head", h("div", { role: "rowheader", "aria-colspan": this.columns }, h("h3", { id: section.id }, section.title), h("span", { class: "soft num" }, section.about)));
  }

  cells(row) {
    return this.place(row, "grid-row", this.rows[row].items.map((item, column) => this.cell(item, row, column)));
  }

  cell(item, row, column) {
    const [width, height] = shownSize(item), box = h("span", { class: "thumb" }), name = item.path.slice(item.path.lastIndexOf("/") + 1);
    box.style.width = `${width}px`;
    box.style.height = `${height}px`;
    const { focus, ...placed } = this.placed(item);
    if (item.bucket) box.append(keptBox(placed), ...(focus ? [markedBox(focus)] : []));
    this.thumbs.add(box, item, width, height);
    const marks = item.bucket ? [h("b", { class: lossClass(item.loss) }, item.loss ? `−${percent(item.loss)}` : "uncut"), item.scale > 1.001 ? ` ×${item.scale.toFixed(2)}` : ""] : [h("b", { class: "bad" }, "no bucket")];
    const fate = item.bucket ? inShort(item.bucket, item.loss, item.scale) : "no bucket", label = `${item.path}, ${size([item.width, item.height])}: ${fate}`;
    return h("div", { role: "gridcell", class: "cell", tabindex: "-1", "aria-colindex": column + 1, title: label, onclick: () => this.open(item) },
      h("span", { class: "cell-box" }, box), h("span", { class: "cell-name" }, name), h("span", { class: "cell-size num" }, `${size([item.width, item.height])} `, h("span", { "aria-hidden": "true" }, marks), h("span", { class: "unseen" }, `to ${fate}`)));
  }

  /* One cell is in the order of the tab key; arrows go to the others. */
  tabStop() {
    const old = this.root.querySelector('[role="gridcell"][tabindex="0"]'), now = this.cellAt(this.at) || this.root.querySelector('[role="gridcell"]');
    if (old && old !== now) old.tabIndex = -1;
    if (now) now.tabIndex = 0;
  }

  cellAt({ row, column }) { return this.nodes.get(row)?.querySelectorAll('[role="gridcell"]')[column]; }

  focused(event) {
    const cell = event.target.closest('[role="gridcell"]');
    if (!cell) return;
    this.at = { row: +cell.parentNode.getAttribute("aria-rowindex") - 1, column: +cell.getAttribute("aria-colindex") - 1 };
    this.tabStop();
  }

  key(event) {
    const { row, column } = this.at, page = Math.max(1, Math.floor(innerHeight / (BOX + TEXT_TALL)) - 1);
    const moves = {
      ArrowRight: () => this.step(1), ArrowLeft: () => this.step(-1), ArrowDown: () => this.down(row, column, 1), ArrowUp: () => this.down(row, column, -1),
      PageDown: () => this.down(row, column, page), PageUp: () => this.down(row, column, -page), Home: () => this.go(this.nearest(0, 1), 0), End: () => this.go(this.nearest(this.rows.length - 1, -1), Infinity),
      Enter: () => event.target.click(), " ": () => event.target.click(),
    };
    if (!moves[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    moves[event.key]();
  }

  /* The row with images at or after `row` in a direction. */
  nearest(row, way) {
    while (this.rows[row] && !this.rows[row].items) row += way;
    return this.rows[row] ? row : this.at.row;
  }

  step(by) {
    const { row, column } = this.at, to = column + by, items = this.rows[row]?.items;
    if (items && to >= 0 && to < items.length) this.go(row, to);
    else if (this.rows[row + by]) { const next = this.nearest(row + by, by); if (next !== row) this.go(next, by > 0 ? 0 : Infinity); }
  }

  down(row, column, by) {
    const way = Math.sign(by);
    let to = row;
    for (let left = Math.abs(by); left > 0 && this.rows[to + way]; left--) to = this.nearest(to + way, way);
    this.go(to, column);
  }

  go(row, column) {
    const { top, tall, items } = this.rows[row] || {};
    if (!items) return;
    const above = this.root.getBoundingClientRect().top + top;
    if (above < 60) window.scrollBy(0, above - 60); else if (above + tall > innerHeight) window.scrollBy(0, above + tall - innerHeight + 12);
    this.at = { row, column: Math.min(column, items.length - 1) };
    this.render();
    this.cellAt(this.at)?.focus({ preventScroll: true });
  }

  /* To the section of this id, and its first image. */
  goTo(id) {
    const row = this.rows.findIndex((one) => !one.items && one.section.id === id);
    if (row < 0) return;
    window.scrollTo({ top: scrollY + this.root.getBoundingClientRect().top + this.rows[row].top - 8, behavior: "auto" });
    this.go(this.nearest(row, 1), 0);
  }

  /* To an image, wherever it is. */
  goToImage(item) {
    const row = this.rows.findIndex((one) => one.items?.includes(item));
    if (row >= 0) this.go(row, this.rows[row].items.indexOf(item));
  }

  /* The image after or before one, in the order of the page. */
  beside(item, by) {
    const all = this.sections.flatMap((section) => section.items), at = all.indexOf(item);
    return at < 0 ? null : all[at + by] || null;
  }
}
