const inPairs = (counts) => counts.filter((_, i) => i % 2 === 0).map((count, i) => count + counts[2 * i + 1]);

/* The images' aspects with the buckets below. `look()`: {rule, histogram: {reach, counts, beyond}, buckets, asked}. */
function aspectChart(look) {
  const isSetRule = (rule) => rule && rule.kind === "set";
  const box = h("div"), readout = h("p", { class: "readout", "aria-live": "polite" });
  const about = h("p");
  let hist = null, chosen = null;
  const draw = () => {
    const d = look(), rule = d.rule, isSet = isSetRule(rule);
    hist = d.histogram;
    const used = d.buckets.map((b, k) => ({ bucket: [b[0], b[1]], images: b[2], k }));
    const fullest = [...used].sort((p, q) => q.images - p.images).slice(0, MOST_ROWS);
    about.textContent = isSet
    ? "Bars count images. Marks below are the buckets, filled and with their size where they hold images; dotted lines are the aspects at which images switch to the next bucket."
      + (rule.sizes.length > 1 && rule.switching === "midpoint" ? " They are not symmetric: the distance is measured on width / height, so a portrait and the same image in landscape can switch at different aspects." : "")
    : `Bars count images; marks below are ${used.length > MOST_ROWS ? `the ${int(MOST_ROWS)} fullest of the buckets` : "the buckets"} that occur. In this mode there are no fixed switching points: each image brings its bucket.`;
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
      if (!mark.images || taken.some((other) => Math.abs(other - at) < 11.5)) continue;
      taken.push(at);
      g.push(s("text", { class: "bucket-label", "text-anchor": "end", transform: `translate(${at + 3.5} ${labels}) rotate(-90)` }, size(mark.bucket)));
    }
    if (d.asked && d.asked.width) {
      const log = Math.max(-reach, Math.min(reach, Math.log2(d.asked.width / d.asked.height)));
      g.push(s("line", { class: "asked", x1: x(log), x2: x(log), y1: top - 2, y2: top + plot }));
    }
    const svg = s("svg", { width, height: labels + 62, role: "img", tabindex: 0, "aria-label": inWords(d, hist) }, g);
    const read = (bin) => {
      if (bin < 0 || bin >= n) return;
      chosen = bin;
      const from = 2 ** (-reach + (2 * reach * bin) / n), to = 2 ** (-reach + (2 * reach * (bin + 1)) / n);
      const middle = Math.sqrt(from * to);
      const goes = isSet && !rule.no_upscale && rule.max_crop === null ? ` → ${size(rule.sizes[rule.order[countBelow(rule.thresholds, middle)]])}` : "";
      readout.textContent = `Aspect ${from.toFixed(3)} to ${to.toFixed(3)}: ${images(counts[bin])}${goes}`;
    };
    svg.addEventListener("mousemove", (event) => read(Math.floor(((event.offsetX - left) / inner) * n)));
    svg.addEventListener("mouseleave", rest);
    svg.addEventListener("blur", rest);
    svg.addEventListener("keydown", (event) => { // from bar to bar
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!way) return;
      event.preventDefault();
      let bin = chosen === null ? (way > 0 ? 0 : n - 1) : chosen + way;
      while (bin >= 0 && bin < n && !counts[bin]) bin += way;
      read(bin);
    });
    box.replaceChildren(svg);
    rest();
  };
  const rest = () => { chosen = null; readout.textContent = hist.beyond ? `${images(hist.beyond)} beyond either end ${hist.beyond === 1 ? "is" : "are"} counted in the outermost bars.` : `${matchMedia("(pointer: coarse)").matches ? "Tap" : "Point at"} a bar to read it.`; };
  return { parts: [help("How to read this chart", about), box, readout], draw };
}

/* The chart for those who do not see it. */
function inWords(d, hist) {
  const total = hist.counts.reduce((sum, n) => sum + n, 0), half = hist.counts.length / 2;
  const share = (n) => percent(n / Math.max(total, 1)), upright = hist.counts.slice(0, half - 1).reduce((sum, n) => sum + n, 0);
  const wide = hist.counts.slice(half + 1).reduce((sum, n) => sum + n, 0);
  const top = d.buckets.filter((b) => b[2]).sort((p, q) => q[2] - p[2]).slice(0, 3).map((b) => `${size(b)} (${int(b[2])})`);
  return `Histogram of ${images(total)} by aspect: ${share(upright)} upright, ${share(wide)} wide, the rest about square. Fullest buckets: ${top.join(", ") || "none"}.`;
}
