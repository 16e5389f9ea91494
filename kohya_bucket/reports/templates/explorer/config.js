/* A dataset config of sd-scripts: what of it is shown, and its text with what was changed. */

const DEFAULTS = { resolution: null, batch_size: 1, enable_bucket: false, min_bucket_reso: 256, max_bucket_reso: 1024, bucket_reso_steps: 64, bucket_no_upscale: false, num_repeats: 1 };
const OURS = { rule: "kohya", switching: null, no_upscale_fit: "kohya", max_crop: null, token_tolerance: 0.05, focus: null };
/* Of [kohya_bucket]: with them, batches are not those of one size that the page counts. */
const BATCHES = ["remainder", "small_buckets", "max_pixels", "max_tokens", "resolutions"];
const named = (table, ...name) => table.name.length === name.length && name.every((part, i) => table.name[i] === part);
const KINDS = {
  batch_size: (v) => Number.isInteger(v) && v > 0, min_bucket_reso: Number.isInteger, max_bucket_reso: Number.isInteger, bucket_reso_steps: (v) => Number.isInteger(v) && v > 0,
  num_repeats: (v) => Number.isInteger(v) && v > 0, enable_bucket: (v) => typeof v === "boolean", bucket_no_upscale: (v) => typeof v === "boolean",
  resolution: (v) => [v].flat().length <= 2 && [v].flat().every((side) => Number.isInteger(side) && side > 0) && [v].flat().length > 0,
};

/* A resolution as [width, height]; other values as they are. */
const alike = (key, value) => (key === "resolution" && value !== null ? [value, value].flat().slice(0, 2) : value);

class Config {
  constructor(text, name) {
    this.name = name;
    this.read(text.replace(/^\ufeff/, ""));
    if (!this.datasets.length) throw new TomlError("it has no [[datasets]]: is it a dataset config?");
    for (const table of [...this.general, ...this.datasets.flatMap((d) => [d.table, ...d.subsets])]) {
      for (const { key, value, line } of table.entries) {
        if (key.length === 1 && KINDS[key[0]] && !KINDS[key[0]](value)) throw new TomlError(`line ${line}: ${key[0]} is ${JSON.stringify(value)}, which it cannot be`);
      }
    }
  }

  read(text) {
    this.text = text;
    const { tables } = new TomlText(text);
    this.tables = tables;
    this.general = tables.filter((table) => named(table, "general") && !table.array);
    this.ours = tables.filter((table) => named(table, "kohya_bucket"));
    this.datasets = [];
    for (const table of tables) {
      if (named(table, "datasets") && table.array) this.datasets.push({ table, subsets: [] });
      else if (named(table, "datasets", "subsets") && this.datasets.length) this.datasets.at(-1).subsets.push(table);
    }
  }

  /* Where a key's value stands in the first of these tables that has it. */
  find(tables, key) {
    for (const table of tables) {
      const entry = table.entries.find((one) => one.key.length === 1 && one.key[0] === key);
      if (entry) return entry;
    }
    return null;
  }

  get(d, key) { return alike(key, this.find([this.datasets[d].table, ...this.general], key)?.value ?? DEFAULTS[key]); }
  repeats(d, s) { return this.find([this.datasets[d].subsets[s], this.datasets[d].table, ...this.general], "num_repeats")?.value ?? 1; }
  our(key) { return this.find(this.ours, key)?.value ?? OURS[key]; }
  batchesBy() { return BATCHES.filter((key) => (this.find(this.ours, key)?.value ?? "keep") !== "keep"); }
  imageDir(d, s) { const dir = this.find([this.datasets[d].subsets[s]], "image_dir")?.value; return typeof dir === "string" ? dir : null; }

  /* Writes a value where it stands: in the dataset, in [general] if there is one dataset only, else into the dataset. */
  set(d, key, value) {
    if (String(alike(key, this.get(d, key))) === String(alike(key, value))) return;
    const { table } = this.datasets[d], tables = this.datasets.length === 1 ? [table, ...this.general] : [table];
    this.write(this.find(tables, key), table, key, Array.isArray(value) && value[0] === value[1] ? value[0] : value);
  }

  setRepeats(d, s, value) {
    if (this.repeats(d, s) === value) return;
    const table = this.datasets[d].subsets[s];
    this.write(this.find([table], "num_repeats"), table, "num_repeats", value);
  }

  setOur(key, value) {
    if (this.our(key) === value) return;
    if (!this.ours.length) this.read(`${this.text.replace(/\n*$/, "\n")}\n[kohya_bucket]\n`);
    const entry = this.find(this.ours, key);
    if (value !== null) this.write(entry, this.ours[0], key, value);
    else this.read(this.text.slice(0, entry.keyStart) + this.text.slice(entry.end).replace(/^[^\n]*\n?[ \t]*/, ""));
  }

  write(entry, table, key, value) {
    const { text } = this;
    if (entry) return this.read(text.slice(0, entry.start) + asToml(value) + text.slice(entry.end));
    const end = text.indexOf("\n", table.after), at = end < 0 ? text.length : end + 1;
    const first = table.entries[0], indent = first ? /[ \t]*$/.exec(text.slice(0, first.keyStart))[0] : "";
    return this.read(`${text.slice(0, at)}${end < 0 ? "\n" : ""}${indent}${key} = ${asToml(value)}\n${text.slice(at)}`);
  }

  /* What is kept but not shown, in lines for the reader. */
  notes(sets) {
    const kept = new Set(), out = [], shown = new Set([...Object.keys(DEFAULTS), "image_dir"]);
    for (const table of this.tables) {
      const mine = this.general.includes(table) || this.datasets.some((d) => d.table === table || d.subsets.includes(table));
      for (const { key } of table.entries) {
        const known = this.ours.includes(table) ? key[0] in OURS : mine && shown.has(key[0]);
        if (!known || key.length > 1) kept.add([...(mine ? [] : table.name), ...key].join("."));
      }
    }
    if (kept.size) out.push(`Kept as written, and not shown here: ${[...kept].join(", ")}.`);
    if (this.batchesBy().length) out.push(`Batches are not counted here, since they follow from ${this.batchesBy().join(" and ")}: kohya-bucket plan shows them.`);
    const rule = this.our("rule");
    if (!bucketsOf(rule, sets)) out.push(`rule = ${JSON.stringify(rule)} cannot be shown here: images are placed as by sd-scripts. kohya-bucket analyze --config shows it.`);
    for (const [d] of this.datasets.entries()) if (this.get(d, "resolution") === null) out.push(`Dataset ${d + 1} has no resolution: it is shown with the one on this page, and saved with it.`);
    return out;
  }
}

/* The choice on the page that a `rule` is: "kohya", "token_band", a bundled set, or null; and the rule of a choice. */
const ruleNamed = (buckets) => (["kohya", "token_band"].includes(buckets) ? buckets : `preset:${buckets}`);
const bucketsOf = (rule, sets) => (["kohya", "token_band"].includes(rule) ? rule : typeof rule === "string" && rule.startsWith("preset:") && sets[rule.slice(7)] ? rule.slice(7) : null);

/* A config for folders that had none, each with the ending of its captions or null. */
function newConfig(settings, groups) {
  const lines = ["[general]", "enable_bucket = true", "", "[[datasets]]"], v = settings.values;
  lines.push(`batch_size = ${v.batch}`, `min_bucket_reso = ${v.min}`, `max_bucket_reso = ${v.max}`, `bucket_reso_steps = ${v.steps}`, `bucket_no_upscale = ${v.noUpscale}`);
  for (const [group, captions] of groups) {
    const name = NAMED.exec(group.full)?.[2];
    lines.push("", "  [[datasets.subsets]]", `  image_dir = ${asToml(group.full || ".")}`, `  num_repeats = ${group.repeats}`);
    if (captions) lines.push(`  caption_extension = ${asToml(captions)}`);
    else if (name) lines.push(`  class_tokens = ${asToml(name)}`);
  }
  const config = new Config(`${lines.join("\n")}\n`, "dataset.toml");
  settings.into(config, 0);
  return config.text;
}
