/* What decides the buckets, as a form. */

const PAGE = JSON.parse(document.getElementById("data").textContent);
const MODELS = PAGE.families.map(([name, side, min, max, steps]) => ({ name, resolution: [side, side], min, max, steps }));
const { name: _, ...FIRST } = MODELS[0];
const START = { ...FIRST, batch: 1, noUpscale: false, buckets: "kohya", switching: null, fit: "kohya", maxCrop: null, tolerance: 0.05, ...PAGE.settings };
const gcd = (a, b) => (b ? gcd(b, a % b) : a);

class Settings {
  /* `sets`: bundled sets {name: {sizes, about}}; `changed()` is called after each change. */
  constructor(sets, changed) {
    this.sets = Object.fromEntries(Object.entries(sets).map(([name, set]) => [name, set.sizes]));
    this.values = { ...START };
    this.changed = changed;
    const field = (label, input, about) => h("label", { class: "field", title: about || null }, h("span", {}, label), input);
    const whole = (key, least) => h("input", { type: "number", min: least, step: key === "batch" ? 1 : 8, name: key, inputmode: "numeric", oninput: (event) => this.put({ [key]: event.target.valueAsNumber }) });
    const select = (name, options, put) => h("select", { name, onchange: (event) => put(event.target.value) }, options.map(([value, text]) => h("option", { value }, text)));
    const inputs = {
      model: select("model", [...MODELS.map((model, i) => [i, model.name]), ["", "own values"]], (i) => i !== "" && this.put({ ...MODELS[i], name: undefined, buckets: this.values.buckets })),
      buckets: select("buckets", [["kohya", "made by sd-scripts"], ["token_band", "all of about as many tokens"], ["none", "one for all (enable_bucket off)"], ...Object.keys(sets).map((name) => [name, `set ${name}, ${sets[name].sizes.length} sizes`])], (value) => this.choose(value)),
      resolution: h("input", { type: "text", name: "resolution", size: 9, autocomplete: "off", spellcheck: "false", oninput: (event) => this.resolution(event.target.value) }),
      steps: whole("steps", 1), min: whole("min", 1), max: whole("max", 1), batch: whole("batch", 1),
      noUpscale: h("input", { type: "checkbox", name: "noUpscale", onchange: (event) => this.put({ noUpscale: event.target.checked }) }),
      maxCrop: h("input", { type: "number", name: "maxCrop", min: 0, max: 99, step: 1, placeholder: "none", oninput: (event) => this.put({ maxCrop: event.target.value === "" ? null : event.target.valueAsNumber / 100 }) }),
      switching: select("switching", [["", "the rule's own"], ["midpoint", "midpoint"], ["geometric", "geometric"], ["area", "area"]], (value) => this.put({ switching: value || null })),
      fit: select("fit", ["kohya", "largest", "standard"].map((name) => [name, name]), (value) => this.put({ fit: value })),
    };
    this.inputs = inputs;
    this.error = h("p", { class: "bad", role: "alert" });
    this.root = h("form", { class: "settings", onsubmit: (event) => event.preventDefault() },
      h("div", { class: "fields" }, field("Model", inputs.model), field("Resolution", inputs.resolution, "1024, or 832×1216"), field("Steps", inputs.steps, "bucket_reso_steps"),
        field("Shortest side", inputs.min, "min_bucket_reso"), field("Longest side", inputs.max, "max_bucket_reso"), field("Buckets", inputs.buckets), field("Batch size", inputs.batch, "batch_size"),
        h("label", { class: "check", title: "bucket_no_upscale" }, inputs.noUpscale, "Never enlarge")),
      h("details", {}, h("summary", {}, "Options of kohya_bucket"), h("div", { class: "fields" }, field("At most cut off, %", inputs.maxCrop, "max_crop"), field("Neighbours hand over at", inputs.switching, "switching"), field("Never enlarge: fit", inputs.fit, "no_upscale_fit"))),
      this.error);
    this.write();
  }

  /* A bundled set has its own step. */
  choose(buckets) {
    const sizes = this.sets[buckets], steps = sizes && sizes.some((b) => b[0] % this.values.steps || b[1] % this.values.steps) ? sizes.flat().reduce(gcd) : this.values.steps;
    this.put({ buckets, steps });
  }

  resolution(text) {
    const match = /^\s*(\d{1,6})\s*(?:[x×*,;: ]\s*(\d{1,6}))?\s*$/i.exec(text);
    this.put({ resolution: match ? [+match[1], +(match[2] || match[1])] : [NaN, NaN] }, "resolution");
  }

  put(some) {
    for (const [key, value] of Object.entries(some)) if (value !== undefined) this.values[key] = value;
    this.write();
    this.changed();
  }

  /* The values into the fields, except for the one that is being typed in. */
  write() {
    const v = this.values, { inputs } = this, own = document.activeElement;
    const model = MODELS.findIndex((m) => String(m.resolution) === String(v.resolution) && m.min === v.min && m.max === v.max && m.steps === v.steps);
    const chosen = MODELS[inputs.model.value];
    const same = chosen && String(chosen.resolution) === String(v.resolution) && chosen.min === v.min && chosen.max === v.max && chosen.steps === v.steps;
    const texts = {
      model: same ? inputs.model.value : model < 0 ? "" : model, buckets: v.buckets, resolution: v.resolution[0] === v.resolution[1] ? v.resolution[0] : `${v.resolution[0]}×${v.resolution[1]}`,
      steps: v.steps, min: v.min, max: v.max, batch: v.batch, maxCrop: v.maxCrop === null ? "" : +(100 * v.maxCrop).toFixed(4), switching: v.switching || "", fit: v.fit,
    };
    for (const [key, text] of Object.entries(texts)) if (inputs[key] !== own || inputs[key].tagName === "SELECT") inputs[key].value = Number.isNaN(text) ? "" : text;
    inputs.noUpscale.checked = v.noUpscale;
  }

  /* {rule} or {error}, which is shown. */
  rule() {
    const found = Number.isInteger(this.values.batch) && this.values.batch > 0 ? ruleOf(this.values, this.sets) : { error: "the batch size must be a whole number of 1 or more" };
    this.error.textContent = found.error ? `${found.error}.` : "";
    return found;
  }

  /* From a dataset of a config. */
  from(config, d) {
    const get = (key) => config.get(d, key), buckets = get("enable_bucket") ? bucketsOf(config.our("rule"), this.sets) || "kohya" : "none";
    this.values = {
      resolution: get("resolution") || this.values.resolution, steps: get("bucket_reso_steps"), min: get("min_bucket_reso"), max: get("max_bucket_reso"), batch: get("batch_size"),
      noUpscale: get("bucket_no_upscale"), buckets, switching: config.our("switching"), fit: config.our("no_upscale_fit"), maxCrop: config.our("max_crop"), tolerance: config.our("token_tolerance"),
    };
    this.write();
  }

  /* Into a dataset of a config. */
  into(config, d) {
    const v = this.values, before = bucketsOf(config.our("rule"), this.sets);
    if ((v.buckets === "none") === config.get(d, "enable_bucket")) config.set(d, "enable_bucket", v.buckets !== "none");
    const keys = { resolution: v.resolution, batch_size: v.batch, min_bucket_reso: v.min, max_bucket_reso: v.max, bucket_reso_steps: v.steps, bucket_no_upscale: v.noUpscale };
    for (const [key, value] of Object.entries(keys)) config.set(d, key, value);
    // A rule that is not known here stays, unless another was chosen.
    if (v.buckets !== "none" && v.buckets !== (before || "kohya")) config.setOur("rule", ruleNamed(v.buckets));
    for (const [key, value] of [["switching", v.switching], ["no_upscale_fit", v.fit], ["max_crop", v.maxCrop]]) config.setOur(key, value);
  }
}
