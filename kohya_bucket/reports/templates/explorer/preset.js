/* A preset of the kohya_ss GUI: its settings of buckets, and its text with what was changed. */

const OF_PRESET = { resolution: "max_resolution", batch_size: "train_batch_size", enable_bucket: "enable_bucket", min_bucket_reso: "min_bucket_reso", max_bucket_reso: "max_bucket_reso", bucket_reso_steps: "bucket_reso_steps", bucket_no_upscale: "bucket_no_upscale" };

class Preset {
  constructor(text, name) {
    this.text = text.replace(/^\ufeff/, "");
    const data = this.data();
    if (!data || !("max_resolution" in data)) throw new TomlError("it is not a preset of the GUI: it has no max_resolution");
    if (data.dataset_config) throw new TomlError(`its datasets are in ${data.dataset_config}: load that file`);
    this.name = name;
    this.saveAs = `${name.replace(/\.json$/i, "")}-buckets.json`; // beside the old one, never over it
    this.datasets = [{ table: null, subsets: [] }]; // the folders are those in train_data_dir, with their repeats in their names
    this.chosen = { ...OURS };
  }

  data() {
    try {
      const data = JSON.parse(this.text);
      return data && typeof data === "object" && !Array.isArray(data) ? data : null;
    } catch (error) {
      throw new TomlError(`it is not JSON (${error.message})`);
    }
  }

  get(d, key) {
    const value = this.data()[OF_PRESET[key]];
    if (value === undefined || value === "" || value === null) return DEFAULTS[key];
    const read = key === "resolution" ? String(value).split(",").map(Number) : typeof DEFAULTS[key] === "boolean" ? value : Number(value);
    return alike(key, KINDS[key](read) ? read : DEFAULTS[key]);
  }

  /* Writes a value in its place, a text where a text stood, and leaves every other character. */
  set(d, key, value) {
    if (String(this.get(d, key)) === String(alike(key, value))) return;
    const name = OF_PRESET[key], plain = key === "resolution" ? [value, value].flat().slice(0, 2).join(",") : value;
    const made = JSON.stringify(typeof this.data()[name] === "string" || key === "resolution" ? String(plain) : plain);
    const place = new RegExp(`((?<!\\\\)"${name}"\\s*:\\s*)("(?:[^"\\\\]|\\\\.)*"|[^\\s,}]+)`), there = place.test(this.text);
    this.text = there ? this.text.replace(place, (_, before) => before + made) : this.text.replace("{", () => `{\n  ${JSON.stringify(name)}: ${made},`);
  }

  our(key) { return this.chosen[key]; }
  setOur(key, value) { this.chosen[key] = value; }
  repeats() { return 1; }
  setRepeats() {}
  imageDir() { return null; }
  batchesBy() { return []; }

  notes() {
    const lost = Object.keys(OURS).filter((key) => this.chosen[key] !== OURS[key]);
    const out = ["Images and repeats are those of the folders in its train_data_dir, such as 10_name."];
    if (lost.length) out.push(`A preset has no place for ${lost.join(", ")}: put them into a file that KOHYA_BUCKET_CONFIG names, under [kohya_bucket].`);
    return out;
  }
}
