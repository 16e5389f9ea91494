/* The parts of the page below the form. */

/* Key numbers, what is lost first, each with what it was before the last change. Without a `batchSize` batches are not
   counted. */
function numbers(now, before, items, batchSize) {
  const cells = [], lost = (r) => r.bad.length + r.unplaced.length, share = (r) => r.enlarged / Math.max(r.placed, 1);
  const cell = (text, label, value, cls, lead) => cells.push(h("div", { class: lead ? "lead" : null }, h("b", { class: cls || null }, text(value(now))), h("span", {}, label),
    before && text(value(before)) !== text(value(now)) ? h("span", { class: "was" }, `was ${text(value(before))}`) : null));
  cell(int, `not trained, of ${images(items.length)}`, lost, lost(now) ? "bad" : "", true);
  cell(percent, "cut off, mean", (r) => r.mean, lossClass(now.mean * 2), true);
  cell(percent, "cut off of 19 in 20, at most", (r) => r.p95, lossClass(now.p95));
  cell(percent, "cut off, worst", (r) => r.worst, lossClass(now.worst));
  cell(percent, "enlarged", share, share(now) > 0.3 ? "warn" : "");
  cell(int, now.buckets.length === 1 ? "bucket used" : "buckets used", (r) => r.buckets.length);
  if (batchSize) cell(int, batchSize > 1 ? `${now.batches === 1 ? "batch" : "batches"} of ${batchSize} an epoch, ${int(now.short)} not full` : `${now.batches === 1 ? "step" : "steps"} an epoch at batch size 1`, (r) => r.batches);
  return cells;
}

function bucketTable(list, batchSize, goTo) {
  const most = list.reduce((m, b) => Math.max(m, b.items.length), 1);
  const meter = (b) => { const bar = h("i", { class: "meter" }); bar.style.width = `${Math.max(1, (100 * b.items.length) / most)}%`; return h("span", { class: "meterbox" }, bar); };
  const columns = [
    { name: "Bucket", left: true, value: (b) => b.bucket[0] * 1e6 + b.bucket[1], cell: (b) => [shapeOf(b.bucket), h("button", { type: "button", class: "bare link", onclick: () => goTo(b) }, size(b.bucket)), b.batches === 1 && b.last ? h("span", { class: "tag warn" }, "never full") : null] },
    { name: "Aspect", cls: "wide", value: (b) => b.bucket[0] / b.bucket[1], cell: (b) => (b.bucket[0] / b.bucket[1]).toFixed(3) },
    { name: "Images", value: (b) => b.items.length, cell: (b) => int(b.items.length) },
    { name: "", label: "Share of images", left: true, cls: "wide", value: (b) => b.items.length, cell: meter },
    { name: "Samples", cls: "wide", value: (b) => b.samples, cell: (b) => int(b.samples) },
    ...(batchSize ? [
      { name: "Batches", cls: "wide", value: (b) => b.batches, cell: (b) => int(b.batches) },
      { name: "Last batch", cls: "wide", value: (b) => b.last || batchSize, cell: (b) => (b.last ? `${b.last} of ${batchSize}` : "full") },
    ] : []),
    { name: "Cut off, mean", value: (b) => b.mean, cell: (b) => h("span", { class: lossClass(b.mean) }, percent(b.mean)) },
    { name: "Worst", value: (b) => b.worst, cell: (b) => h("span", { class: lossClass(b.worst) }, percent(b.worst)) },
    { name: "Enlarged", value: (b) => b.enlarged / b.items.length, cell: (b) => percent(b.enlarged / b.items.length) },
  ];
  const note = list.length > MOST_ROWS ? h("p", { class: "soft" }, `The first ${int(MOST_ROWS)} of ${int(list.length)} buckets in the order chosen are shown.`) : null;
  return [note, sortable(columns, list, { by: 1, down: false, label: "Buckets", text: (b) => size(b.bucket) }).node].filter(Boolean);
}

/* What is not trained, with the reason, and the same as a text to keep. */
function lostTable(lost, reasons) {
  const why = (item) => item.reason || reasons[item.why];
  const columns = [
    { name: "File", left: true, cls: "wrap", value: (item) => item.path, cell: (item) => item.path },
    { name: "Why", left: true, cls: "wrap", value: why, cell: (item) => withCommands(why(item)) },
  ];
  const more = lost.length > MOST_ROWS ? ` The first ${int(MOST_ROWS)} of ${int(lost.length)}; the exported list has all.` : "";
  const escaped = (text) => text.replace(/[\u0000-\u001f\u007f]/g, (sign) => `\\x${sign.charCodeAt(0).toString(16).padStart(2, "0")}`);
  const text = () => `${lost.map((item) => `${escaped(item.path)}\t${escaped(why(item))}`).join("\n")}\n`;
  return [h("div", { class: "tools" }, h("span", { class: "soft" }, `These are not trained.${more}`), h("button", { type: "button", id: "export", onclick: () => save("bad-files.txt", text()) }, "Export this list")),
    sortable(columns, lost, { label: "Files that are not trained", text: (item) => item.path }).node];
}

/* Folders and how often an epoch repeats them; of many the first few. */
const FIRST_FOLDERS = 5;
function folderTable(groups, changed) {
  const title = (g) => g.folder || g.full?.split("/").at(-1) || "(no folder)"; // of dropped files the browser tells none
  const columns = [
    { name: "Folder", left: true, cls: "wrap", value: (g) => g.folder, cell: title },
    { name: "Images", value: (g) => g.images, cell: (g) => int(g.images) },
    { name: "Repeats", value: (g) => g.repeats, cell: (g) => h("input", { type: "number", min: 1, step: 1, value: g.repeats, class: "narrow", "aria-label": `Repeats of ${g.folder || "files without a folder"}`, onchange: (event) => { const n = event.target.valueAsNumber; if (Number.isInteger(n) && n > 0) { g.repeats = n; changed(); } else event.target.value = g.repeats; } }) },
  ];
  return sortable(columns, groups, { label: "Folders", first: FIRST_FOLDERS, text: (g) => g.folder }).node;
}

/* Hands a text to the browser's downloads. */
function save(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/* One image, large: what is cut off on each side, and the neighbours. */
class Closer {
  /* `marked(item, box, done)` is told of a focus that changes; `closed()` that all is as it shall be. */
  constructor(gallery, about, marked, closed) {
    this.gallery = gallery;
    this.about = about;
    this.mark = new FocusMark((box, done) => { marked(this.item, box, done); this.refresh(); });
    this.body = h("div");
    this.title = h("h2", { id: "closer-title" });
    const button = (text, label, onclick) => h("button", { type: "button", "aria-label": label, onclick }, text);
    this.root = h("dialog", { class: "closer", "aria-labelledby": "closer-title", onclose: () => { this.release?.(); closed(); this.gallery.goToImage(this.item); }, onkeydown: (event) => { if (event.key === "ArrowRight") this.beside(1); else if (event.key === "ArrowLeft") this.beside(-1); }, onclick: (event) => { if (event.target === this.root) this.root.close(); } },
      h("div", { class: "closer-head" }, this.title, h("div", { class: "closer-buttons" }, button("←", "Image before", () => this.beside(-1)), button("→", "Next image", () => this.beside(1)), button("Close", "Close", () => this.root.close()))), this.body);
  }

  beside(by) {
    const item = this.gallery.beside(this.item, by);
    if (item) this.show(item);
  }

  show(item) {
    this.release?.();
    this.item = item;
    this.title.textContent = item.path;
    const picture = (width, height) => { const { node, release } = storedPicture(item, width, height); this.release = release; return node; };
    this.body.replaceChildren(...this.parts(picture));
    const figure = this.body.querySelector(".preview");
    if (figure) this.mark.over(figure, this.about(item).result.focus || null);
    if (!this.root.open) this.root.showModal();
  }

  parts(picture) {
    const { item } = this, { rule, result, about } = this.about(item);
    return answerParts(rule, item.width, item.height, result, { ...about, picture, longest: Math.min(440, innerWidth - 70) });
  }

  /* What follows from a focus that changed; the picture stays. */
  refresh() {
    const [now] = this.parts(null);
    for (const part of [".kept", ".facts"]) this.body.querySelector(part).replaceWith(now.querySelector(part));
  }
}
