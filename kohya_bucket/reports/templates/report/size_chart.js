/* Widths and heights, coloured by what is cut off. */
function sizeChart(view) {
  const d = view.data, rule = d.rule, box = h("div"), readout = h("p", { class: "readout", "aria-live": "polite" });
  const points = d.scatter, xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const area = !rule ? 0 : rule.kind === "no_upscale" ? rule.max_area : Math.max(...rule.sizes.map((b) => b[0] * b[1]));
  // A point's area grows with its images; where every point holds one or two, all stay small.
  const fullest = points.reduce((most, p) => Math.max(most, p[2]), 1), spread = Math.min(3.5, 0.35 * Math.sqrt(fullest));
  const marks = d.buckets.length <= 120 ? d.buckets : [];
  const rest = "Below the dashed line an image has fewer pixels than the largest bucket.";
  const tell = (best) => { readout.textContent = best ? `${size(best)}${best[2] > 1 ? `, ${int(best[2])} images of about this size` : ""}: ${best[3] < 0 ? "no bucket" : `${percent(best[3])} cut off`}` : rest; };
  const inOrder = [...points].sort((p, q) => p[0] * p[1] - q[0] * q[1]);
  let at = -1;
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
    if (view.asked && view.asked.width) {
      const ax = Math.min(Math.max(x(view.asked.width), left), width - right), ay = Math.min(Math.max(y(view.asked.height), top), height - bottom);
      g.push(s("line", { class: "asked", x1: ax - 7, x2: ax + 7, y1: ay, y2: ay }), s("line", { class: "asked", x1: ax, x2: ax, y1: ay - 7, y2: ay + 7 }));
    }
    const svg = s("svg", { width, height, role: "img", tabindex: 0, "aria-label": `Widths and heights of the images: ${int(Math.min(...xs))} to ${int(Math.max(...xs))} wide, ${int(Math.min(...ys))} to ${int(Math.max(...ys))} high. The table of buckets and the lists say the same in numbers.` }, g);
    svg.addEventListener("mousemove", (event) => {
      let best = null, distance = 144;
      for (const p of points) {
        const away = (x(p[0]) - event.offsetX) ** 2 + (y(p[1]) - event.offsetY) ** 2;
        if (away < distance) { best = p; distance = away; }
      }
      tell(best);
    });
    svg.addEventListener("keydown", (event) => { // from the smallest image to the largest
      const way = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
      if (!way) return;
      event.preventDefault();
      at = Math.min(Math.max(at + way, 0), inOrder.length - 1);
      tell(inOrder[at]);
    });
    svg.addEventListener("click", (event) => {
      const w = Math.round(2 ** (x0 + ((event.offsetX - left) / (width - left - right)) * (x1 - x0)));
      const t = Math.round(2 ** (y0 + ((height - bottom - event.offsetY) / (height - bottom - top)) * (y1 - y0)));
      if (w > 0 && t > 0) view.showSize(w, t);
    });
    box.replaceChildren(svg);
  };
  view.draws.push(draw);
  view.listeners.push(draw);
  readout.textContent = rest;
  const key = (cls, text) => h("span", {}, h("i", { class: cls }), text);
  return section("sizes", "Sizes", box,
    h("div", { class: "legend" }, key("low", "under 5% cut off"), key("mid", "5–15%"), key("high", "over 15%"),
      points.some((p) => p[3] < 0) ? key("none", "no bucket") : null, marks.length ? key("square", "bucket") : null, key("dashes", "largest bucket area")),
    readout);
}
