const DATA = JSON.parse(document.getElementById("data").textContent);

/* One dataset on the page, with the size that is being asked about. */
class View {
  constructor(data) {
    this.data = data;
    this.asked = null;
    this.listeners = [];
    this.root = h("div");
    this.draws = [];
    const changes = data.advice.length ? advice(this) : null, pictures = data.sheets.length ? sheets(this) : null;
    const panels = [keyNumbers(this), ...(onPhone.matches ? [pictures, changes] : [changes, pictures]), this.ask()];
    if (data.buckets.length) panels.push(buckets(this));
    if (data.trainers.length) panels.push(trainers(this));
    if (data.focus) panels.push(focusPanel(this));
    panels.push(lists(this), this.forTheCurious());
    this.root.append(...panels.filter(Boolean));
    const [example] = data.lists.filter((list) => list.kind === "images" && list.rows.length);
    this.field.value = example ? size(example.rows[0].slice(1, 3)) : "1920×1080";
    this.typed();
  }

  redraw() { for (const draw of this.draws) draw(); }

  setAsked(asked) {
    this.asked = asked;
    cancelAnimationFrame(this.pending);
    this.pending = requestAnimationFrame(() => { for (const listen of this.listeners) listen(asked); });
  }

  showSize(width, height) {
    this.field.value = `${width}×${height}`;
    this.typed();
    bringIntoView(this.askPanel, "nearest");
  }

  /* What explains the rest, and asks nothing of who only wants to train. */
  forTheCurious() {
    const { histogram, scatter } = this.data, charts = [histogram ? this.aspects() : null, scatter.length ? sizeChart(this) : null].filter(Boolean);
    if (!charts.length) return null;
    const part = section("curious", "For the curious", charts);
    setFolded(part, true);
    return part;
  }

  aspects() {
    const { parts, draw } = aspectChart(() => ({ rule: this.data.rule, histogram: this.data.histogram, buckets: this.data.buckets, asked: this.asked }));
    this.draws.push(draw);
    this.listeners.push(draw);
    return section("aspects", "Aspects", parts);
  }

  ask() {
    const answer = h("div", { id: "answer", "aria-live": "polite" });
    this.field = h("input", { type: "text", id: "size", placeholder: "1920×1080", autocomplete: "off", spellcheck: "false", "aria-label": "Image size, width × height", oninput: () => this.typed(), onfocus: (event) => event.target.select() });
    const chooser = h("input", { type: "file", id: "file", class: "unseen", accept: "image/*", onchange: (event) => this.dropped(event.target.files[0]) });
    this.answerBox = answer;
    this.askPanel = section("try", "Try a size",
      h("p", { class: "soft" }, "Type a size, or drop an image anywhere on this page: it stays on this computer. Sizes are taken as stored, as in training; EXIF rotation is ignored."),
      h("div", { class: "ask" }, this.field, h("label", {}, chooser, "choose an image")), answer);
    return this.askPanel;
  }

  typed() {
    const match = /^\s*(\d{1,7})\s*(?:[x×*,;:/ ]|by)\s*(\d{1,7})\s*$/i.exec(this.field.value);
    if (!this.field.value.trim()) { this.answerBox.replaceChildren(); this.setAsked(null); return; }
    if (!match || +match[1] < 1 || +match[2] < 1) {
      this.answerBox.replaceChildren(h("p", { class: "soft" }, "Width × height in pixels, for example 1920×1080."));
      this.setAsked(null);
      return;
    }
    this.answer(+match[1], +match[2], null);
  }

  async dropped(file) {
    if (!file) return;
    try {
      const { img, width, height } = await asStored(file);
      this.field.value = `${width}×${height}`;
      this.answer(width, height, () => img, file.name);
    } catch {
      this.field.value = "";
      this.answerBox.replaceChildren(h("p", { class: "bad" }, `This browser cannot read ${file.name} as an image.`));
      this.setAsked(null);
    }
    bringIntoView(this.askPanel, "nearest");
  }

  answer(width, height, picture, name) {
    const d = this.data, rule = d.rule;
    if (!rule) {
      this.answerBox.replaceChildren(h("p", { class: "soft" }, "This rule cannot be repeated in the browser; kohya-bucket simulate answers for it."));
      return;
    }
    const result = place(rule, width, height);
    this.answerBox.dataset.result = JSON.stringify(result);
    const row = result.bucket && d.buckets.find((b) => b[0] === result.bucket[0] && b[1] === result.bucket[1]);
    const parts = answerParts(rule, width, height, result, { name, picture, count: row && row[2], reasons: DATA.reasons });
    if (d.focus) parts.push(h("p", { class: "soft" }, "This goes by the size alone: an image's focus can move its crop."));
    this.answerBox.replaceChildren(...parts);
    this.setAsked({ width, height });
  }
}

/* A picture of `file` as it is stored, with its size in pixels: browsers turn it as its EXIF asks, training does not. */
async function asStored(file) {
  const src = URL.createObjectURL(file), img = h("img", { class: "as-stored", alt: "", src });
  document.body.append(img);
  try {
    await img.decode();
    return { img, width: img.offsetWidth, height: img.offsetHeight };
  } finally { img.remove(); URL.revokeObjectURL(src); }
}

let shown = null;
function start() {
  const page = document.getElementById("page"), place = h("main");
  const heading = h("h1"), about = h("p", { class: "soft" }), links = h("nav", { class: "links", "aria-label": "On this page" });
  const views = new Map();
  const tabs = DATA.datasets.map((d) => h("button", { type: "button", onclick: () => show(d) }, d.name, h("span", { class: "num" }, int(d.found))));
  function show(d) {
    if (!views.has(d)) views.set(d, new View(d));
    shown = views.get(d);
    heading.textContent = DATA.datasets.length > 1 ? DATA.title : d.name;
    const lines = [[d.rule_text, d.batches_of, d.source].filter(Boolean).join(" · "), ...(d.clips ? d.clips.lines : [])];
    about.replaceChildren(...lines.map((line) => h("div", {}, line)));
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", DATA.datasets[i] === d));
    place.replaceChildren(shown.root);
    links.replaceChildren(...[...shown.root.children].filter((part) => part.matches("section.panel[id]")).map((part) => h("a", { href: `#${part.id}` }, part.querySelector("h2").firstChild.data)));
    shown.redraw();
  }
  page.append(h("header", { class: "top" }, mark(), h("div", {}, heading, about), themeButton()),
    tabs.length > 1 ? h("div", { class: "tabs", role: "group", "aria-label": "Datasets" }, tabs) : "", links, place,
    h("footer", {}, `kohya-bucket ${DATA.version}, ${DATA.made}. This file is complete in itself and asks nothing from the network.`));
  if (DATA.datasets.length) show(DATA.datasets[0]);
  // What a link into the page names is drawn only now.
  goToHash();
  let pending = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => shown && shown.redraw()); });
  window.addEventListener("dragover", (event) => { event.preventDefault(); if (shown) shown.askPanel.classList.add("drop"); });
  window.addEventListener("dragleave", () => shown && shown.askPanel.classList.remove("drop"));
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    if (!shown) return;
    shown.askPanel.classList.remove("drop");
    shown.dropped(event.dataTransfer.files[0]);
  });
}
start();
