/* The page: what is dropped on it, placed by the form's settings. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const GROWN = 1.8; // a folder that is being read is shown again when so many times as many images are there

class Explorer extends WithConfig {
  constructor() {
    super();
    this.images = new Collection(DATA.endings, DATA.trained);
    this.focus = new FocusRows(this.images);
    this.settings = new Settings(DATA.sets, () => this.update(true));
    this.gallery = new Gallery((item) => this.closer.show(item), (item) => this.placed(item));
    this.closer = new Closer(this.gallery, (item) => this.about(item), (...now) => this.marked(...now), () => this.afterMarks());
    this.config = null;
    this.dataset = 0;
    this.view = 0;
    this.turn = 0;
    this.result = null;
    this.build();
    if (DATA.start) this.begin(DATA.start);
    this.update();
  }

  build() {
    const hidden = (id, label, attributes, take) => [h("input", { type: "file", id, class: "unseen", multiple: true, ...attributes, onchange: (event) => { take(event.target.files); event.target.value = ""; } }), h("label", { class: "button", for: id }, label)];
    this.status = h("p", { class: "soft status", role: "status" });
    this.progress = h("progress", { "aria-label": "Headers read", hidden: true });
    this.configNotes = h("div", { class: "soft notes" });
    this.focusNotes = h("div", { class: "soft notes", id: "focus-notes" });
    this.focusLine = h("span");
    this.focusBar = h("div", { class: "tools", id: "focus", hidden: true }, this.focusLine, h("button", { type: "button", id: "save-focus", onclick: () => this.saveFocus() }, "Save the focus"));
    this.datasets = h("div", { class: "tabs", role: "group", "aria-label": "Datasets" });
    this.key = h("section", { class: "key num", id: "numbers", "aria-label": "Key numbers" });
    this.tabs = h("div", { class: "tabs", role: "group", "aria-label": "Which images" });
    this.about_ = h("p", { class: "soft" });
    this.bucketBody = h("div");
    this.lostBody = h("div");
    this.folderBody = h("div");
    this.orders = choice("Order", ORDERS, (order) => { this.order = order; if (this.result) this.drawImages(); });
    this.more = h("button", { type: "button", class: "more", onclick: () => { this.all = true; this.drawImages(); } });
    this.chart = aspectChart(() => ({ rule: this.rule, histogram: this.histogram(), buckets: this.chartBuckets(), asked: null }));
    const add = (files) => this.read(chosenFiles([...files]));
    this.drop = h("section", { class: "drop-zone", id: "drop", "aria-label": "Images" },
      h("p", { class: "drop-title" }, "Drop a folder of images here"),
      h("p", { class: "soft" }, "Thousands of files are fine. Nothing leaves this computer: only headers are read, and a picture when it comes into sight."),
      h("div", { class: "buttons" }, h("button", { type: "button", class: "main", onclick: () => this.pick() }, "Choose a folder"), h("input", { type: "file", id: "folder", hidden: true, webkitdirectory: true, onchange: (event) => { add(event.target.files); event.target.value = ""; } }), hidden("files", "Choose files", { accept: "image/*" }, add),
        hidden("toml", "Load a config or preset", { accept: ".toml,.json", multiple: false }, (files) => files[0] && this.loadConfig(files[0])),
        hidden("focus-file", "Load a focus file", { accept: ".jsonl", multiple: false }, (files) => files[0] && this.loadFocus(files[0])),
        h("button", { type: "button", id: "save", onclick: () => this.saveConfig() }, "Save the TOML"),
        h("button", { type: "button", id: "example", onclick: () => this.example() }, "See an example"),
        h("button", { type: "button", id: "clear", onclick: () => this.clear() }, "Start again")),
      this.progress, this.status, this.configNotes, this.focusNotes);
    const settings = section("settings", "Settings", this.datasets, this.settings.root);
    const pictures = section("images", "Images", this.focusBar, this.tabs, this.orders, this.about_, this.gallery.root, this.more);
    const tables = [section("aspects", "Aspects", this.chart.parts), section("buckets", "Buckets", this.bucketBody),
      section("lost", "Not trained", this.lostBody), section("folders", "Folders", h("p", { class: "soft" }, "How often an epoch repeats the images of each."), this.folderBody)];
    const parts = onPhone.matches ? [this.key, pictures, settings, ...tables] : [settings, this.key, ...tables, pictures];
    const page = document.getElementById("page");
    page.classList.add("explorer");
    this.page = page;
    page.append(h("header", { class: "top" }, mark(), h("div", {}, h("h1", {}, "Bucket explorer"), h("p", { class: "soft" }, "Which bucket every image goes to, what is cut off, what is enlarged, what stands out.")), themeButton()),
      h("nav", { class: "links", "aria-label": "On this page" }, parts.filter((part) => part !== this.key).map((part) => h("a", { href: `#${part.id}`, id: `to-${part.id}` }, part.querySelector("h2").firstChild.data))),
      h("main", {}, this.drop, parts), this.closer.root,
      h("footer", {}, `kohya-bucket ${DATA.version}. This file is complete in itself and asks nothing from the network. `, DATA.start && DATA.start.images ? "Pictures are shown as long as the images lie where they lay. " : ""));
    this.listen();
  }

  listen() {
    const over = (on) => this.drop.classList.toggle("over", on);
    window.addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
    window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) over(false); });
    window.addEventListener("drop", (event) => {
      event.preventDefault();
      over(false);
      const { items, files } = event.dataTransfer;
      if (files.length === 1 && /\.(toml|json)$/i.test(files[0].name)) { this.loadConfig(files[0]); return; }
      if (files.length === 1 && /\.jsonl$/i.test(files[0].name)) { this.loadFocus(files[0]); return; }
      this.read(this.dropped([...items].filter((item) => item.kind === "file"), [...files]));
    });
    window.addEventListener("resize", atFrame(() => this.images.items.length && this.chart.draw()));
  }

  /* Asks for a folder. A list of thousands of files, as the older way brings, is a freeze in itself. */
  async pick() {
    if (!window.showDirectoryPicker) { document.getElementById("folder").click(); return; }
    const handle = await window.showDirectoryPicker().catch(() => null);
    if (handle) this.read(handledFiles([handle]));
  }

  /* What lies in dropped files and folders. All is asked for at once: after that the browser forgets what was dropped. */
  async* dropped(items, files) {
    const entries = items.map((item) => item.webkitGetAsEntry?.()).filter(Boolean), asked = items.map((item) => item.getAsFileSystemHandle?.());
    const handles = await Promise.all(asked).catch(() => []);
    if (handles.length && handles.every(Boolean)) yield* handledFiles(handles);
    else yield* entries.length ? droppedFiles(entries) : chosenFiles(files);
  }

  begin({ images, config, dataset, focus }) {
    if (config) this.takeConfig(config.text, config.name);
    this.images.take(images);
    if (focus) this.focus.load(focus.text, focus.name, { root: partsOf(images.root), folder: partsOf(focus.folder) });
    this.match();
    if (dataset) this.choose(dataset);
    this.status.textContent = `${plural(this.images.items.length)} from ${DATA.start.name}.`;
  }

  async read(found) {
    const began = performance.now(), { reading } = this.images;
    let next = 200;
    const show = atFrame(() => { this.progress.max = reading.all; this.progress.value = reading.done; });
    this.progress.hidden = false;
    this.status.textContent = "Reading headers…";
    const tick = () => {
      show();
      if (this.images.items.length > next) { next = this.images.items.length * GROWN; this.update(); }
    };
    try {
      await this.images.read(found, tick);
    } catch (error) {
      this.progress.hidden = true;
      this.status.textContent = `This folder cannot be read (${error.message || error.name}): use "Choose a folder".`;
      return;
    }
    if (this.images.reading !== reading) return;
    const { focusFile } = this.images;
    this.images.focusFile = null;
    if (focusFile) this.focus.load(await (await focusFile.file()).text(), focusFile.path, { root: [], folder: partsOf(folderOf(focusFile.path)) });
    else this.focus.match();
    this.match();
    await this.update();
    if (reading.done < reading.all) return;
    this.progress.hidden = true;
    const passed = [...this.images.passedOver].sort((a, b) => b[1] - a[1]), others = passed.reduce((sum, one) => sum + one[1], 0);
    const bad = this.images.items.filter((item) => item.reason && !item.unlisted).length, unlisted = this.images.items.filter((item) => item.unlisted).length;
    this.status.textContent = [`${plural(reading.done)} read in ${((performance.now() - began) / 1000).toFixed(1)} s`, bad ? `${int(bad)} of them not readable` : "", unlisted ? `${int(unlisted)} that no trainer lists` : "",
      others ? `${int(others)} other ${others === 1 ? "file" : "files"} skipped (${passed.slice(0, 4).map(([ending]) => ending || "no ending").join(", ")})` : ""].filter(Boolean).join(", ") + ".";
    document.documentElement.dataset.read = reading.done;
  }

  clear() {
    this.images.stop();
    this.focus.clear();
    this.progress.hidden = true;
    this.status.textContent = "";
    this.result = null;
    this.all = false;
    this.update();
  }

  /* Sizes as a folder of photographs and drawings has them, without pictures. */
  example() {
    let seed = 7;
    const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647, group = this.images.group("example");
    for (let i = 0; i < 240; i++) {
      const aspect = [2 / 3, 3 / 4, 1, 4 / 3, 1.5, 16 / 9, 9 / 16][Math.floor(random() * 7)] * (random() < 0.4 ? Math.exp((random() - 0.5) * 0.5) : 1);
      const side = 300 + 2600 * random() ** 2;
      this.images.add({ path: `example/${String(i).padStart(3, "0")}.jpg`, width: Math.round(side * Math.sqrt(aspect)), height: Math.round(side / Math.sqrt(aspect)), orientation: 1, reason: null }, group);
    }
    this.status.textContent = "240 made-up sizes, without pictures.";
    this.update();
  }

  histogram() {
    const key = `${this.images.version} ${this.dataset} ${this.config ? 1 : 0}`;
    if (this.histogramOf !== key) { this.histogramOf = key; this.histogramMade = aspectHistogram(this.mine()); }
    return this.histogramMade;
  }

  /* For the chart: buckets with images, and of a set those without. */
  chartBuckets() {
    const used = (this.result ? this.result.buckets : []).map((b) => [...b.bucket, b.items.length]), taken = new Set(used.map((b) => size(b)));
    return [...used, ...(this.rule.kind === "set" ? this.rule.sizes.filter((b) => !taken.has(size(b))).map((b) => [...b, 0]) : [])];
  }

  about(item) {
    const bucket = item.bucket && this.result.buckets.find((one) => String(one.bucket) === String(item.bucket));
    const result = this.placed(item), cut = result.focusCut;
    const more = [...(cut ? [["focus", this.aboutFocus(cut)]] : []), ["stored as", size([item.width, item.height])], ...(item.orientation > 1 ? [["EXIF", `asks for orientation ${item.orientation}; trained as stored`]] : [])];
    return { rule: this.rule, result, about: { reasons: DATA.reasons, count: bucket && bucket.items.length, more } };
  }

  /* What the crop keeps of a focus, and what would be without one, as `simulate` says it. */
  aboutFocus({ now, middle }) {
    return `${now ? `${percent(now)} of it cut off` : "whole"}; the middle would cut off ${percent(middle)} of it`;
  }

  /* Places all images again and draws what came of it; `compare` keeps the numbers of before beside them. */
  async update(compare = false) {
    const { rule, error } = this.settings.rule(), turn = ++this.turn, current = () => turn === this.turn;
    this.page.classList.toggle("stale", Boolean(error));
    if (error) return;
    this.rule = rule;
    this.takeRepeats();
    const items = this.mine(), before = compare ? this.settled || this.result : null;
    this.page.classList.toggle("empty", !this.images.items.length);
    if (!await placeAll(items, (item) => this.placed(item), current)) return;
    const batch = this.config && this.config.batchesBy().length ? null : this.settings.values.batch, result = await gather(items, batch, current);
    if (!result || !current()) return;
    this.result = result;
    if (!compare || before === null) this.settled = null;
    for (const draw of [() => this.key.replaceChildren(...numbers(result, before, items, batch)), () => this.chart.draw(),
      () => this.bucketBody.replaceChildren(...bucketTable(result.buckets, batch, (b) => this.goToBucket(b))),
      () => this.drawLost([...result.bad, ...result.unplaced]), () => this.drawFolders(), () => this.drawImages()]) {
      draw();
      await breathe();
      if (!current()) return;
    }
    this.settled = result;
    document.documentElement.dataset.placed = `${items.length} ${turn}`;
  }

  /* Anew only where it differs from what is shown: so a field keeps the focus, and what was unfolded stays so. */
  drawFolders() {
    const groups = [...this.images.groups.values()].filter((group) => group.images), says = () => JSON.stringify(groups.map((group) => [group.full, group.images, group.repeats]));
    if (this.foldersShown === says()) return;
    this.foldersShown = says();
    this.folderBody.replaceChildren(folderTable(groups, () => { this.foldersShown = says(); this.update(true); }));
  }

  drawLost(lost) {
    for (const id of ["lost", "to-lost"]) document.getElementById(id).hidden = !lost.length;
    this.lostBody.replaceChildren(...(lost.length ? lostTable(lost, DATA.reasons) : []));
  }

  /* An image's placement, with its focus kept. */
  placed(item) { return keeping(place(this.rule, item.width, item.height), this.focus.of(item.path)); }

  async loadFocus(file) {
    this.focus.load(await file.text(), file.name);
    if (this.config) this.drawConfig();
    this.update();
  }

  /* A focus was drawn in the dialog; the page behind it follows when it is closed. */
  marked(item, box, done) {
    this.focus.put(item.path, box);
    if (done) for (const one of this.images.items) if (one.path === item.path) one.focusCut = this.placed(one).focusCut;
    this.marks = true;
  }

  afterMarks() {
    if (this.marks) this.drawImages();
    this.marks = false;
  }

  saveFocus() {
    const text = this.focus.text(), name = (this.focus.name || "").split("/").at(-1) || "focus.jsonl";
    save(name, text);
    this.drawFocus();
    if (text) this.focusNotes.append(h("p", {}, `${name} names images such as ${JSON.parse(text.slice(0, text.indexOf("\n"))).image}: put it in the folder from which that path leads to them, and name it in the TOML, under [kohya_bucket]: focus = ${JSON.stringify(name)}, with its path.`));
  }

  drawFocus() {
    const found = this.mine().filter((item) => item.bucket && item.focusCut), cut = (when) => int(found.filter((item) => item.focusCut[when] > 0).length);
    this.focusBar.hidden = !(this.focus.rows.size || this.focus.loose.length || this.focus.name);
    this.focusLine.textContent = !found.length ? "" : `${int(found.length)} ${found.length === 1 ? "rectangle" : "rectangles"}; the middle would cut ${cut("middle")}, these crops cut ${cut("now")}.${this.settings.values.buckets === "none" ? " A focus needs enable_bucket: without it, training refuses it." : ""}`;
    this.focusNotes.replaceChildren(...this.focus.notes().map((line) => h("p", {}, line)));
  }

  goToBucket(b) {
    this.view = 0;
    this.all = true;
    this.orders.querySelector("button").click(); // in buckets
    this.gallery.goTo(`bucket-${size(b.bucket)}`);
  }

  drawImages() {
    this.drawFocus();
    const items = this.mine(), { buckets, unplaced } = this.result, view = VIEWS[this.view];
    this.tabs.replaceChildren(...VIEWS.map((one, i) => [one, i, items.filter(one.has).length]).filter(([, i, n]) => n || !i).map(([one, i, n]) =>
      h("button", { type: "button", "aria-pressed": String(i === this.view), onclick: () => { this.view = i; this.drawImages(); } }, one.name, h("span", { class: "num" }, int(n)))));
    this.about_.textContent = view.about;
    const none = unplaced.filter(view.has), all = this.order.sections(buckets, view.has);
    if (none.length) all.push({ id: "bucket-none", title: "No bucket", items: none, about: `${plural(none.length)}, not trained` });
    const few = onPhone.matches && !this.all, shown = few ? firstOf(all, FIRST_IMAGES) : all, left = all.reduce((sum, one) => sum + one.items.length, 0) - shown.reduce((sum, one) => sum + one.items.length, 0);
    this.more.hidden = !left;
    this.more.textContent = `Show ${int(left)} more`;
    this.gallery.show(shown);
  }
}

const plural = images;
const explorer = new Explorer();
