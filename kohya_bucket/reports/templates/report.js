const DATA = JSON.parse(document.getElementById("data").textContent);
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

function ratioText(aspect) {
  const near = RATIOS.find(([a, b]) => Math.abs(Math.log(aspect / (a / b))) < 0.012);
  return near ? `${aspect.toFixed(3)} (${near[0]}:${near[1]})` : aspect.toFixed(3);
}

/* Rows as a table whose columns sort; `columns`: {name, value, cell, left, cls}. At most MOST_ROWS are drawn. */
const MOST_ROWS = 400;
function sortable(columns, rows, options) {
  const body = h("tbody");
  let by = options.by ?? null, down = options.down ?? true, wanted = "";
  const heads = columns.map((column, i) =>
    h("th", { class: column.left ? "left" : null, "aria-sort": "none", scope: "col" },
      h("button", { type: "button", onclick: () => { down = by === i ? !down : !column.left; by = i; draw(); } }, column.name)));
  function draw() {
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : down ? "descending" : "ascending"));
    let shown = rows.filter((row) => !wanted || options.text(row).toLowerCase().includes(wanted));
    if (by !== null) {
      const value = columns[by].value;
      shown = shown.map((row, i) => [value(row), i, row]);
      shown.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * (down ? -1 : 1) || a[1] - b[1]);
      shown = shown.map((entry) => entry[2]);
    }
    body.replaceChildren(...shown.slice(0, MOST_ROWS).map((row) => {
      const attributes = options.row ? options.row(row) : {};
      return h("tr", attributes, columns.map((c) => h("td", { class: [c.left ? "left" : "", c.cls || ""].join(" ").trim() || null, title: c.title ? c.title(row) : null }, c.cell(row))));
    }));
  }
  draw();
  const table = h("table", {}, h("thead", {}, h("tr", {}, heads)), body);
  return { table, filter: (text) => { wanted = text.trim().toLowerCase(); draw(); } };
}

const inPairs = (counts) => counts.filter((_, i) => i % 2 === 0).map((count, i) => count + counts[2 * i + 1]);

function shapeOf(bucket) {
  const unit = 18 / Math.max(bucket[0], bucket[1]);
  const w = Math.max(2, bucket[0] * unit), height = Math.max(2, bucket[1] * unit);
  return s("svg", { class: "shape", viewBox: "0 0 24 22", "aria-hidden": "true" }, s("rect", { x: 12 - w / 2, y: 11 - height / 2, width: w, height }));
}

/* One data set on the page, with the size that is being asked about. */
class View {
  constructor(data) {
    this.data = data;
    this.asked = null;
    this.listeners = [];
    this.root = h("div");
    this.draws = [];
    const panels = [this.keyNumbers()];
    if (data.advice.length) panels.push(this.advice());
    if (data.histogram) panels.push(this.aspects());
    panels.push(h("div", { class: "pair" }, data.scatter.length ? this.scatter() : null, this.ask()));
    if (data.buckets.length) panels.push(this.buckets());
    if (data.sheets.length) panels.push(this.sheets());
    panels.push(this.lists());
    this.root.append(...panels.filter(Boolean));
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
    this.askPanel.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  keyNumbers() {
    const d = this.data, t = d.summary, cells = [];
    const cell = (value, label, cls) => cells.push(h("div", {}, h("b", { class: cls || null }, value), h("span", {}, label)));
    cell(int(d.found), d.broken ? `images, ${int(d.broken)} broken` : "images");
    const lost = d.broken + t.unplaced;
    cell(int(lost), "not trained", lost ? "bad" : "");
    cell(int(t.buckets), d.underfilled ? `buckets used, ${int(d.underfilled)} never fill a batch` : "buckets used");
    cell(percent(t.mean_crop), "cut off, mean", lossClass(t.mean_crop * 2));
    cell(percent(t.p95_crop), "cut off, 95th percentile", lossClass(t.p95_crop));
    cell(percent(t.worst_crop), "cut off, worst", lossClass(t.worst_crop));
    cell(percent(t.enlarged), "enlarged", t.enlarged > 0.3 ? "warn" : "");
    cell(int(t.batches), d.batch_size > 1 ? `batches of ${d.batch_size} an epoch, ${int(t.short_batches)} not full` : "steps an epoch at batch size 1");
    return h("section", { class: "key num" }, cells);
  }

  advice() {
    return h("section", { class: "panel" }, h("h2", {}, "What to change"),
      h("p", { class: "soft" }, "Each line was measured by placing these images again with that one setting changed."),
      h("ul", { class: "advice" }, this.data.advice.map((a) => h("li", {},
        h("div", { class: "change" }, h("code", {}, a.setting), h("div", {}, `${a.current} → `, h("b", {}, a.proposed))),
        h("div", {}, h("div", {}, `${a.why}.`),
          a.gain ? h("div", { class: "effect good" }, `Gain: ${a.gain}`) : null,
          a.cost ? h("div", { class: "effect warn" }, `Cost: ${a.cost}`) : null)))));
  }

  aspects() {
    const d = this.data, rule = d.rule, hist = d.histogram;
    const isSet = rule && rule.kind === "set";
    const box = h("div"), readout = h("p", { class: "readout" });
    const used = d.buckets.map((b, k) => ({ bucket: [b[0], b[1]], images: b[2], k }));
    const fullest = [...used].sort((p, q) => q.images - p.images).slice(0, MOST_ROWS);
    const about = isSet
      ? "Bars count images. Marks below are the buckets, filled where they hold images; dotted lines are the aspects at which one bucket hands over to the next."
        + (rule.sizes.length > 1 && rule.switching === "midpoint" ? " They are not mirror images of each other: the distance is taken on width / height, so a portrait can switch where its landscape twin does not." : "")
      : `Bars count images; marks below are ${used.length > MOST_ROWS ? `the ${int(MOST_ROWS)} fullest of the buckets` : "the buckets"} that occur. In this mode there are no fixed switching points: each image brings its bucket.`;
    const draw = () => {
      const width = box.clientWidth || 1000, plot = width < 620 ? 150 : 190, left = 4, right = 4, top = 20;
      const reach = hist.reach, inner = width - left - right, counts = width < 620 ? inPairs(hist.counts) : hist.counts, n = counts.length;
      const x = (log) => left + ((log + reach) / (2 * reach)) * inner;
      const most = Math.max(...counts, 1), y = (count) => top + plot - (count / most) * plot;
      const g = [];
      if (isSet) {
        const edges = [-reach, ...rule.thresholds.map(Math.log2), reach].map((e) => Math.max(-reach, Math.min(reach, e)));
        for (let j = 0; j + 1 < edges.length; j++) {
          if (j % 2 && edges[j + 1] > edges[j]) g.push(s("rect", { class: "band", x: x(edges[j]), y: top, width: x(edges[j + 1]) - x(edges[j]), height: plot }));
        }
      }
      counts.forEach((count, i) => {
        if (!count) return;
        const at = x(-reach + (2 * reach * i) / n), wide = inner / n, tall = Math.max(1, top + plot - y(count));
        g.push(s("rect", { class: "bar", x: at + 0.3, y: top + plot - tall, width: Math.max(0.8, wide - 0.6), height: tall }));
      });
      if (isSet) for (const t of rule.thresholds) {
        const log = Math.log2(t);
        if (Math.abs(log) < reach) g.push(s("line", { class: "switch", x1: x(log), x2: x(log), y1: top, y2: top + plot }));
      }
      g.push(s("line", { class: "strong", x1: left, x2: width - right, y1: top + plot, y2: top + plot }));
      let last = -99;
      for (const [a, b] of RATIOS) {
        const at = x(Math.log2(a / b));
        if (at < 16 || at > width - 16 || at - last < (a === b ? 20 : 34)) continue;
        last = at;
        g.push(s("text", { x: at, y: 12, "text-anchor": "middle" }, `${a}:${b}`));
        g.push(s("line", { class: "grid", x1: at, x2: at, y1: 15, y2: top }));
      }
      const taken = [], labels = top + plot + 14;
      for (const mark of fullest) {
        const log = Math.log2(mark.bucket[0] / mark.bucket[1]);
        if (Math.abs(log) > reach) continue;
        const at = x(log), base = top + plot + 3;
        g.push(s("path", { class: mark.images ? "tick" : "tick idle", d: `M${at} ${base} l3.5 6 h-7 z` }));
        if (taken.some((other) => Math.abs(other - at) < 11.5)) continue;
        taken.push(at);
        g.push(s("text", { class: mark.images ? "bucket-label" : "bucket-label idle", "text-anchor": "end", transform: `translate(${at + 3.5} ${labels}) rotate(-90)` }, size(mark.bucket)));
      }
      if (this.asked && this.asked.width) {
        const log = Math.max(-reach, Math.min(reach, Math.log2(this.asked.width / this.asked.height)));
        g.push(s("line", { class: "asked", x1: x(log), x2: x(log), y1: top - 2, y2: top + plot }));
      }
      const svg = s("svg", { width, height: labels + 62, role: "img", "aria-label": "Histogram of aspects with buckets" }, g);
      svg.addEventListener("mousemove", (event) => {
        const at = (event.offsetX - left) / inner, bin = Math.floor(at * n);
        if (bin < 0 || bin >= n) return;
        const from = 2 ** (-reach + (2 * reach * bin) / n), to = 2 ** (-reach + (2 * reach * (bin + 1)) / n);
        const middle = Math.sqrt(from * to);
        const goes = isSet && !rule.no_upscale && rule.max_crop === null ? ` → ${size(rule.sizes[rule.order[countBelow(rule.thresholds, middle)]])}` : "";
        readout.textContent = `Aspect ${from.toFixed(3)} to ${to.toFixed(3)}: ${images(counts[bin])}${goes}`;
      });
      svg.addEventListener("mouseleave", rest);
      box.replaceChildren(svg);
    };
    const rest = () => { readout.textContent = hist.beyond ? `${images(hist.beyond)} beyond either end ${hist.beyond === 1 ? "is" : "are"} counted in the outermost bars.` : "Point at a bar to read it."; };
    rest();
    this.draws.push(draw);
    this.listeners.push(draw);
    return h("section", { class: "panel" }, h("h2", {}, "Aspects"), h("p", { class: "soft" }, about), box, readout);
  }

  scatter() {
    const d = this.data, rule = d.rule, box = h("div"), readout = h("p", { class: "readout" });
    const points = d.scatter, xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
    const area = !rule ? 0 : rule.kind === "no_upscale" ? rule.max_area : Math.max(...rule.sizes.map((b) => b[0] * b[1]));
    // A point's area grows with its images; where every point holds one or two, all stay small.
    const fullest = points.reduce((most, p) => Math.max(most, p[2]), 1), spread = Math.min(3.5, 0.35 * Math.sqrt(fullest));
    const marks = d.buckets.length <= 120 ? d.buckets : [];
    const rest = "Below the dashed line an image has fewer pixels than the largest bucket.";
    const draw = () => {
      const width = box.clientWidth || 560, height = Math.min(400, Math.max(300, width * 0.72));
      const left = 42, bottom = 24, top = 8, right = 10;
      const all = (values, extra) => [Math.log2(Math.min(...values, ...extra)), Math.log2(Math.max(...values, ...extra))];
      const pad = 0.15;
      let [x0, x1] = all(xs, marks.map((b) => b[0])), [y0, y1] = all(ys, marks.map((b) => b[1]));
      x0 -= pad; x1 += pad; y0 -= pad; y1 += pad;
      const x = (v) => left + ((Math.log2(v) - x0) / (x1 - x0)) * (width - left - right);
      const y = (v) => height - bottom - ((Math.log2(v) - y0) / (y1 - y0)) * (height - bottom - top);
      const g = [];
      // Labels where there is room for them, from the largest down.
      let lastX = Infinity, lastY = -Infinity;
      for (let e = 19; e >= 0; e--) {
        const v = 2 ** e;
        if (e >= x0 && e <= x1) {
          g.push(s("line", { class: "grid", x1: x(v), x2: x(v), y1: top, y2: height - bottom }));
          const at = Math.min(x(v), width - 3.5 * int(v).length), room = 3.5 * int(v).length + 4;
          if (at + room < lastX) { g.push(s("text", { x: at, y: height - 8, "text-anchor": "middle" }, int(v))); lastX = at - room; }
        }
        if (e >= y0 && e <= y1) {
          g.push(s("line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
          if (y(v) - lastY > 13) { g.push(s("text", { x: left - 5, y: y(v) + 4, "text-anchor": "end" }, int(v))); lastY = y(v); }
        }
      }
      g.push(s("text", { x: width - right, y: height - bottom - 5, "text-anchor": "end" }, "width"), s("text", { x: left + 5, y: top + 10 }, "height"));
      for (const p of points) g.push(s("circle", { class: `dot ${dotClass(p[3])}`, cx: x(p[0]).toFixed(1), cy: y(p[1]).toFixed(1), r: (1.8 + spread * Math.sqrt(p[2] / fullest)).toFixed(1) }));
      if (area) {
        const lx = 2 ** Math.max(x0, Math.log2(area) - y1), hx = 2 ** Math.min(x1, Math.log2(area) - y0);
        if (hx > lx) g.push(s("line", { class: "area", x1: x(lx), y1: y(area / lx), x2: x(hx), y2: y(area / hx) }));
      }
      for (const b of marks) g.push(s("rect", { class: "bucket", x: x(b[0]) - 3, y: y(b[1]) - 3, width: 6, height: 6 }));
      if (this.asked && this.asked.width) {
        const ax = Math.min(Math.max(x(this.asked.width), left), width - right), ay = Math.min(Math.max(y(this.asked.height), top), height - bottom);
        g.push(s("line", { class: "asked", x1: ax - 7, x2: ax + 7, y1: ay, y2: ay }), s("line", { class: "asked", x1: ax, x2: ax, y1: ay - 7, y2: ay + 7 }));
      }
      const svg = s("svg", { width, height, role: "img", "aria-label": "Widths and heights of the images" }, g);
      svg.addEventListener("mousemove", (event) => {
        let best = null, distance = 144;
        for (const p of points) {
          const away = (x(p[0]) - event.offsetX) ** 2 + (y(p[1]) - event.offsetY) ** 2;
          if (away < distance) { best = p; distance = away; }
        }
        readout.textContent = best ? `${size(best)}${best[2] > 1 ? `, ${int(best[2])} images of about this size` : ""}: ${best[3] < 0 ? "no bucket" : `${percent(best[3])} cut off`}` : rest;
      });
      svg.addEventListener("click", (event) => {
        const w = Math.round(2 ** (x0 + ((event.offsetX - left) / (width - left - right)) * (x1 - x0)));
        const t = Math.round(2 ** (y0 + ((height - bottom - event.offsetY) / (height - bottom - top)) * (y1 - y0)));
        if (w > 0 && t > 0) this.showSize(w, t);
      });
      box.replaceChildren(svg);
    };
    this.draws.push(draw);
    this.listeners.push(draw);
    readout.textContent = rest;
    const key = (cls, text) => h("span", {}, h("i", { class: cls }), text);
    return h("section", { class: "panel" }, h("h2", {}, "Sizes"), box,
      h("div", { class: "legend" }, key("low", "under 5% cut off"), key("mid", "5–15%"), key("high", "over 15%"),
        points.some((p) => p[3] < 0) ? key("none", "no bucket") : null, marks.length ? key("square", "bucket") : null, key("dashes", "largest bucket area")),
      readout);
  }

  ask() {
    const d = this.data, answer = h("div", { id: "answer", "aria-live": "polite" });
    this.field = h("input", { type: "text", id: "size", placeholder: "1920×1080", autocomplete: "off", spellcheck: "false", "aria-label": "Image size, width × height", oninput: () => this.typed() });
    const chooser = h("input", { type: "file", id: "file", accept: "image/*", onchange: (event) => this.dropped(event.target.files[0]) });
    this.answerBox = answer;
    const panel = h("section", { class: "panel", id: "try" }, h("h2", {}, "Try a size"),
      h("p", { class: "soft" }, "Type a size, or drop an image anywhere on this page: it stays on this computer. Sizes are taken as stored, as in training; EXIF rotation is ignored."),
      h("div", { class: "ask" }, this.field, h("label", {}, chooser, "choose an image")), answer);
    this.askPanel = panel;
    return panel;
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
      const bitmap = await asStored(file);
      this.field.value = `${bitmap.width}×${bitmap.height}`;
      this.answer(bitmap.width, bitmap.height, bitmap, file.name);
    } catch {
      this.field.value = "";
      this.answerBox.replaceChildren(h("p", { class: "bad" }, `This browser cannot read ${file.name} as an image.`));
      this.setAsked(null);
    }
    this.askPanel.scrollIntoView({ block: "nearest" });
  }

  answer(width, height, bitmap, name) {
    const d = this.data, rule = d.rule;
    if (!rule) {
      this.answerBox.replaceChildren(h("p", { class: "soft" }, "This rule cannot be repeated in the browser; kohya-bucket simulate answers for it."));
      return;
    }
    const result = place(rule, width, height);
    this.answerBox.dataset.result = JSON.stringify(result);
    const parts = [];
    if (result.bucket === null) {
      parts.push(h("p", { class: "bad" }, `${size([width, height])} has no bucket: ${DATA.reasons[result.reason]}.`));
    } else {
      const { bucket, resized, cut } = result;
      const scale = resized[width >= height ? 0 : 1] / Math.max(width, height);
      const row = d.buckets.find((b) => b[0] === bucket[0] && b[1] === bucket[1]);
      const facts = [];
      const fact = (label, value, cls) => facts.push(h("dt", { class: cls || null }, label), h("dd", { class: cls || null }, value));
      fact("bucket", size(bucket), "big");
      if (name) fact("image", name);
      fact("resized to", `${size(resized)} (${scale > 1.001 ? "enlarged" : scale < 0.999 ? "reduced" : "unchanged"}${Math.abs(scale - 1) > 0.001 ? ` ×${scale.toFixed(3)}` : ""})`);
      const sides = ["left", "top", "right", "bottom"].map((side, i) => [side, cut[i]]).filter((c) => c[1]);
      fact("cut off", h("span", { class: lossClass(result.cropLoss) }, sides.length ? `${(100 * result.cropLoss).toFixed(2)}%: ${sides.map((c) => `${c[1]} px ${c[0]}`).join(", ")}` : "nothing"));
      fact("aspect", `${(width / height).toFixed(4)}, the bucket's ${(bucket[0] / bucket[1]).toFixed(4)}`);
      fact("shares it with", row && row[2] ? `${int(row[2])} of the images` : "none of the images");
      parts.push(h("div", { class: "answer" }, preview(result, bitmap), h("dl", { class: "facts" }, facts)));
      parts.push(this.around(rule, width, height, result));
    }
    this.answerBox.replaceChildren(...parts.filter(Boolean));
    this.setAsked({ width, height });
  }

  around(rule, width, height, result) {
    if (rule.kind === "set") {
      if (rule.sizes.length < 2) return null;
      const rows = neighbours(rule, width, height, 2), geometric = rule.switching === "geometric";
      return h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { class: "left" }, "neighbours"), h("th", {}, "aspect"), h("th", {}, geometric ? "log distance" : "distance"), h("th", {}, "would cut"), h("th", {}, "from aspect"))),
        h("tbody", {}, rows.map((n) => h("tr", { class: n.index === result.index ? "here" : null },
          h("td", { class: "left" }, size(n.bucket)), h("td", {}, (n.bucket[0] / n.bucket[1]).toFixed(4)), h("td", {}, (geometric ? Math.abs(Math.log((n.bucket[0] / n.bucket[1]) / (width / height))) : n.distance).toFixed(4)),
          h("td", {}, percent(n.loss)), h("td", {}, n.from === null ? "any" : n.from.toFixed(4)))))));
    }
    const fitted = rule.largest || rule.max_crop !== null;
    if (!result.candidates) return fitted ? null : h("p", { class: "soft" }, "Not larger than the area: it is not resized, only cut to whole steps.");
    return h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { class: "left" }, "candidates"), h("th", {}, "size"), h("th", {}, "aspect error"))),
      h("tbody", {}, result.candidates.map((c, i) => h("tr", { class: c.taken ? "here" : null },
        h("td", { class: "left" }, i ? "height to a step" : "width to a step"), h("td", {}, size(c.bucket)), h("td", {}, c.error.toFixed(4)))))));
  }

  buckets() {
    const d = this.data, used = d.buckets.filter((b) => b[2]), idle = d.buckets.length - used.length;
    const most = used.reduce((m, b) => Math.max(m, b[2]), 1);
    const underfilled = (b) => b[4] === 1 && b[5] > 0;
    const rows = d.buckets.map((b, k) => [b, k]).filter(([b]) => b[2]);
    const meter = (b) => { const bar = h("i", { class: "meter" }); bar.style.width = `${Math.max(1, (100 * b[2]) / most)}%`; return h("span", { class: "meterbox" }, bar); };
    const columns = [
      { name: "Bucket", left: true, value: ([b]) => b[0] * 1e6 + b[1], cell: ([b]) => [shapeOf(b), size(b), underfilled(b) ? h("span", { class: "tag" }, "never full") : null] },
      { name: "Aspect", value: ([b]) => b[0] / b[1], cell: ([b]) => (b[0] / b[1]).toFixed(3) },
      { name: "Images", value: ([b]) => b[2], cell: ([b]) => int(b[2]) },
      { name: "", left: true, value: ([b]) => b[2], cell: ([b]) => meter(b) },
      { name: "Samples", value: ([b]) => b[3], cell: ([b]) => int(b[3]) },
      { name: "Batches", value: ([b]) => b[4], cell: ([b]) => int(b[4]) },
      { name: "Last batch", value: ([b]) => b[5] || d.batch_size, cell: ([b]) => (b[5] ? `${b[5]} of ${d.batch_size}` : "full") },
      { name: "Cut off, mean", value: ([b]) => b[6], cell: ([b]) => h("span", { class: lossClass(b[6]) }, percent(b[6])) },
      { name: "Worst", value: ([b]) => b[7], cell: ([b]) => h("span", { class: lossClass(b[7]) }, percent(b[7])) },
      { name: "Enlarged", value: ([b]) => b[8], cell: ([b]) => percent(b[8]) },
    ];
    let wanted = null;
    const isAsked = (b) => wanted !== null && b[0] === wanted[0] && b[1] === wanted[1];
    const { table } = sortable(columns, rows, {
      by: 1, down: false, text: ([b]) => size(b),
      row: ([b, k]) => ({ class: isAsked(b) ? "link here" : "link", "data-bucket": k, onclick: () => { const to = document.getElementById(`sheet-${k}`); if (to) to.scrollIntoView({ behavior: "smooth" }); } }),
    });
    this.listeners.push((asked) => {
      wanted = asked && d.rule ? place(d.rule, asked.width, asked.height).bucket : null;
      for (const row of table.querySelectorAll("tr.link")) row.classList.toggle("here", isAsked(d.buckets[+row.dataset.bucket]));
    });
    const notes = [];
    if (idle) notes.push(`${int(idle)} more ${idle === 1 ? "bucket" : "buckets"} of the set ${idle === 1 ? "holds" : "hold"} no image.`);
    if (rows.length > MOST_ROWS) notes.push(`The first ${int(MOST_ROWS)} of ${int(rows.length)} buckets in the order chosen are shown; kohya-bucket analyze --json lists all.`);
    if (d.rare.count) notes.push(`${int(d.rare.count)} hold fewer than ${d.rare.below} images.`);
    return h("section", { class: "panel" }, h("h2", {}, "Buckets"), notes.length ? h("p", { class: "soft" }, notes.join(" ")) : null, h("div", { class: "scroll" }, table));
  }

  sheets() {
    const d = this.data, used = d.buckets.filter((b) => b[2]).length;
    const sheets = d.sheets.map((sheet) => {
      const b = d.buckets[sheet.bucket];
      return h("section", { class: "sheet", id: `sheet-${sheet.bucket}` },
        h("header", {}, h("h3", {}, size(b)), h("span", { class: "soft num" }, `${images(b[2])}, ${percent(b[6])} cut off on average, ${percent(b[7])} at worst`)),
        h("div", { class: "shots" }, sheet.shots.map((shot) => this.shot(shot))));
    });
    const left = used - sheets.length;
    return h("section", { class: "panel" }, h("h2", {}, "Contact sheets"),
      h("p", { class: "soft" }, `What is cut off is tinted. The fullest bucket first; in each, the image that loses most comes first, the others are spread down to the one that loses least.${left ? ` The ${int(left)} smallest buckets are left out to keep this file small.` : ""}`),
      h("div", { class: d.sheets.every((sheet) => sheet.shots.length <= 4) ? "sheets tight" : "sheets" }, sheets));
  }

  shot(shot) {
    const [name, width, height, , loss, scale] = shot.row;
    const box = h("div", { class: "thumb" });
    if (shot.picture) {
      const [uri, w, t] = shot.picture;
      box.style.width = `${w}px`;
      box.style.height = `${t}px`;
      const kept = h("div", { class: "kept" });
      ["left", "top", "width", "height"].forEach((side, i) => { kept.style[side] = `${100 * shot.kept[i]}%`; });
      box.append(h("img", { src: uri, alt: "", decoding: "async" }), kept);
    } else box.append(h("div", { class: "missing" }, "its pixels do not decode"));
    const caption = h("figcaption", {}, h("span", {}, name.split("/").pop()), h("span", {}, size([width, height])),
      h("span", {}, [loss ? `−${percent(loss)}` : "uncut", scale > 1.001 ? `×${scale.toFixed(2)}` : null].filter(Boolean).join(", ")));
    const wide = shot.picture ? Math.max(shot.picture[1], 84) : 120;
    caption.style.maxWidth = `${wide}px`;
    return h("figure", { title: shot.caption ? `${name}\n${shot.caption}` : name, onclick: () => this.showSize(width, height) }, box, caption);
  }

  lists() {
    const d = this.data, lists = d.lists.filter((list) => list.count);
    if (!lists.length) return null;
    const body = h("div"), buttons = lists.map((list) => h("button", { type: "button", onclick: () => show(list) }, list.title, h("span", { class: "num" }, int(list.count))));
    const show = (list) => {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", lists[i] === list));
      const bucketText = (k) => (k < 0 ? "none" : size(d.buckets[k]));
      const columns = list.kind === "notes"
        ? [{ name: "Image", left: true, value: (r) => r[0], cell: (r) => r[0], cls: "wrap" }, { name: "What", left: true, value: (r) => r[1], cell: (r) => r[1], cls: "wrap" }]
        : [
          { name: "Image", left: true, cls: "name", value: (r) => r[0], cell: (r) => r[0], title: (r) => r[0] },
          { name: "Size", value: (r) => r[1] * r[2], cell: (r) => size([r[1], r[2]]) },
          { name: "Aspect", value: (r) => r[1] / r[2], cell: (r) => (r[1] / r[2]).toFixed(3) },
          { name: "Bucket", value: (r) => r[3], cell: (r) => bucketText(r[3]) },
          { name: "Cut off", value: (r) => r[4], cell: (r) => (r[4] < 0 ? "" : h("span", { class: lossClass(r[4]) }, percent(r[4]))) },
          { name: "Scaled", value: (r) => r[5], cell: (r) => (r[5] < 0 ? "" : `×${r[5].toFixed(2)}`) },
          ...(list.rows.some((r) => r[6]) ? [{ name: "Note", left: true, cls: "wrap", value: (r) => r[6], cell: (r) => r[6] }] : []),
        ];
      const { table, filter } = sortable(columns, list.rows, {
        text: (r) => r.join(" "),
        row: (r) => (list.kind === "images" ? { class: "link", onclick: () => this.showSize(r[1], r[2]) } : {}),
      });
      const more = list.count > list.rows.length ? ` The first ${int(list.rows.length)} of ${int(list.count)}; kohya-bucket analyze --json --limit lists more.` : "";
      body.replaceChildren(
        h("div", { class: "tools" }, h("span", { class: "soft" }, list.about + more), list.rows.length > 8 ? h("input", { type: "search", placeholder: "filter by name", "aria-label": "Filter", oninput: (event) => filter(event.target.value) }) : null),
        h("div", { class: "scroll" }, table));
    };
    show(lists[0]);
    return h("section", { class: "panel" }, h("h2", {}, "Images that stand out"), h("div", { class: "tabs" }, buttons), body);
  }
}

/* The resized image with the kept area outlined, 190 pixels at most. */
function preview(result, bitmap) {
  const { resized, bucket, cut } = result;
  const unit = Math.min(190 / Math.max(resized[0], resized[1]), 1);
  const frame = h("div", { class: "frame" });
  frame.style.width = `${Math.max(8, resized[0] * unit)}px`;
  frame.style.height = `${Math.max(8, resized[1] * unit)}px`;
  if (bitmap) {
    const canvas = h("canvas", { width: Math.max(1, Math.round(resized[0] * unit * 2)), height: Math.max(1, Math.round(resized[1] * unit * 2)) });
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    frame.append(canvas);
  }
  const kept = h("div", { class: "kept" });
  kept.style.left = `${(100 * cut[0]) / resized[0]}%`;
  kept.style.top = `${(100 * cut[1]) / resized[1]}%`;
  kept.style.width = `${(100 * bucket[0]) / resized[0]}%`;
  kept.style.height = `${(100 * bucket[1]) / resized[1]}%`;
  frame.append(kept);
  return frame;
}

function themeButton() {
  const root = document.documentElement, names = ["auto", "light", "dark"];
  let now = 0;
  const button = h("button", { type: "button", class: "theme", "aria-label": "Colours", onclick: () => { now = (now + 1) % 3; apply(); } });
  const apply = () => {
    if (now) root.dataset.theme = names[now]; else delete root.dataset.theme;
    button.textContent = `Colours: ${names[now]}`;
  };
  apply();
  return button;
}

let shown = null;
function start() {
  const page = document.getElementById("page"), place = h("main");
  const heading = h("h1"), about = h("p", { class: "soft" });
  const views = new Map();
  const tabs = DATA.datasets.map((d) => h("button", { type: "button", onclick: () => show(d) }, d.name, h("span", { class: "num" }, int(d.found))));
  function show(d) {
    if (!views.has(d)) views.set(d, new View(d));
    shown = views.get(d);
    heading.textContent = DATA.datasets.length > 1 ? DATA.title : d.name;
    about.textContent = [d.rule_text, d.batch_size > 1 ? `batch size ${d.batch_size}` : "", d.source].filter(Boolean).join(" · ");
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", DATA.datasets[i] === d));
    place.replaceChildren(shown.root);
    shown.redraw();
  }
  page.append(h("header", { class: "top" }, h("div", {}, heading, about), themeButton()),
    tabs.length > 1 ? h("div", { class: "tabs" }, tabs) : "", place,
    h("footer", {}, `kohya-bucket ${DATA.version}, ${DATA.made}. This file is complete in itself and asks nothing from the network.`));
  if (DATA.datasets.length) show(DATA.datasets[0]);
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
