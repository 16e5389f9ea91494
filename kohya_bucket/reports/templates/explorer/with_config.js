/* The part of the page that is about a dataset config: its datasets, its folders, its text. */

class WithConfig {
  async loadConfig(file) {
    if (file.size > 1 << 24) this.configNotes.replaceChildren(h("p", { class: "bad" }, `${file.name} is larger than any dataset config.`));
    else this.takeConfig(await file.text(), file.name);
    this.update();
  }

  takeConfig(text, name) {
    try {
      this.config = /\.json$/i.test(name) ? new Preset(text, name) : new Config(text, name);
    } catch (error) {
      if (!(error instanceof TomlError)) throw error;
      this.configNotes.replaceChildren(h("p", { class: "bad" }, `${name} is not read: ${error.message}.`));
      return;
    }
    this.dataset = 0;
    this.match();
    this.choose(0);
  }

  choose(d) {
    this.dataset = d;
    this.settings.from(this.config, d);
    this.drawConfig();
    this.update(true);
  }

  drawConfig() {
    const { config } = this, many = config && config.datasets.length > 1;
    document.getElementById("save").textContent = config instanceof Preset ? "Save the preset" : "Save the TOML";
    this.datasets.replaceChildren(...(many ? config.datasets.map((_, d) => h("button", { type: "button", "aria-pressed": String(d === this.dataset), onclick: () => { this.settings.into(config, this.dataset); this.choose(d); } }, `Dataset ${d + 1}`)) : []));
    this.configNotes.replaceChildren(...(config ? [`Settings of ${config.name}${many ? `, dataset ${this.dataset + 1} of ${config.datasets.length}` : ""}.`, ...config.notes(this.settings.sets), ...this.focusUnseen(), ...this.unmatched].map((line) => h("p", {}, line)) : []));
  }

  /* Which folders are subsets of which datasets. */
  match() {
    this.unmatched = [];
    if (!this.config) return;
    const clean = (path) => path.replace(/\\/g, "/").replace(/\/+$/, ""), groups = [...this.images.groups.values()];
    for (const group of groups) {
      let best = 0;
      group.found = [];
      for (const [d, { subsets }] of this.config.datasets.entries()) {
        for (const s of group.datasets && !group.datasets.includes(d) ? [] : subsets.keys()) {
          const dir = clean(this.config.imageDir(d, s) || ""), mine = clean(group.full);
          const length = dir && mine && (dir === mine || dir.endsWith(`/${mine}`) || mine.endsWith(`/${dir}`)) ? Math.min(dir.length, mine.length) : 0;
          if (length && length >= best) { if (length > best) group.found = []; best = length; group.found.push([d, s]); }
        }
      }
    }
    const left = groups.filter((group) => !group.found.length && !group.datasets), some = groups.some((group) => group.found.length);
    for (const group of groups) group.only = some ? group.found : null;
    if (this.config instanceof Preset) this.unmatched = []; // it names the folder above them
    else if (left.length && some) this.unmatched.push(`In no dataset of it, and not shown: ${left.slice(0, 3).map((group) => group.folder || "files without a folder").join(", ")}${left.length > 3 ? ` and ${left.length - 3} more folders` : ""}.`);
    else if (left.length) this.unmatched.push("None of the folders here is an image_dir of it: all images are shown.");
    this.drawConfig();
  }

  mine() {
    const d = this.dataset;
    return this.images.items.filter(({ group }) => (group.datasets ? group.datasets.includes(d) : !group.only || group.only.some(([one]) => one === d)));
  }

  /* A config names the file of the focus, and a page does not read files by itself. */
  focusUnseen() {
    const named = this.config.our("focus");
    return named && this.focus.name === null ? [`focus = ${JSON.stringify(named)} is not shown until that file is loaded here: crops are in the middle.`] : [];
  }

  saveConfig() {
    const groups = [...this.images.groups.values()];
    if (!this.config) {
      save("dataset.toml", newConfig(this.settings, groups.filter((group) => group.images).map((group) => [group, this.images.captionsOf(group)])));
      this.configNotes.replaceChildren(...(DATA.start ? [] : [h("p", {}, "A browser does not tell where a folder lies: complete the paths of image_dir in dataset.toml.")]));
      return;
    }
    this.settings.into(this.config, this.dataset);
    for (const group of groups) for (const [d, s] of group.found || []) if (group.repeats !== group.own) this.config.setRepeats(d, s, group.repeats);
    const lost = groups.filter((group) => group.repeats !== group.own && !(group.found || []).length);
    save(this.config.saveAs || this.config.name, this.config.text);
    this.drawConfig();
    const why = this.config instanceof Preset ? "which a preset takes from the folders' names: rename them" : "which no image_dir names";
    if (lost.length) this.configNotes.append(h("p", { class: "bad" }, `Not saved: the repeats of ${lost.map((group) => group.folder).join(", ")}, ${why}.`));
  }

  /* What a config says of repeats, until it is changed here. */
  takeRepeats() {
    for (const group of this.images.groups.values()) {
      const [mine] = (group.found || []).filter(([d]) => d === this.dataset);
      const own = mine && this.config ? this.config.repeats(...mine) : group.own;
      if (group.repeats === group.own) group.repeats = own;
      group.own = own;
    }
  }
}
