/* What becomes of one image, in words and as a picture. */

/* Nodes about a size. `about`: name, picture, how many images are in the bucket, texts of reasons. */
function answerParts(rule, width, height, result, about) {
  if (result.bucket === null) return [h("p", { class: "bad" }, `${size([width, height])} has no bucket: ${about.reasons[result.reason]}.`)];
  const { bucket, resized, cut } = result, facts = [];
  const scale = resized[width >= height ? 0 : 1] / Math.max(width, height);
  const fact = (label, value, cls) => facts.push(h("dt", { class: cls || null }, label), h("dd", { class: cls || null }, value));
  fact("bucket", size(bucket), "big");
  if (about.name) fact("image", about.name);
  fact("resized to", `${size(resized)} (${scale > 1.001 ? "enlarged" : scale < 0.999 ? "reduced" : "unchanged"}${Math.abs(scale - 1) > 0.001 ? ` ×${scale.toFixed(3)}` : ""})`);
  const sides = ["left", "top", "right", "bottom"].map((side, i) => [side, cut[i]]).filter((c) => c[1]);
  fact("cut off", h("span", { class: lossClass(result.cropLoss) }, sides.length ? `${(100 * result.cropLoss).toFixed(2)}%: ${sides.map((c) => `${c[1]} px ${c[0]}`).join(", ")}` : "nothing"));
  fact("aspect", `${(width / height).toFixed(4)}, the bucket's ${(bucket[0] / bucket[1]).toFixed(4)}`);
  fact("in this bucket", images(about.count || 0));
  for (const [label, value] of about.more || []) fact(label, value);
  return [h("div", { class: "answer" }, preview(result, about.picture, about.longest), h("dl", { class: "facts" }, facts)), around(rule, width, height, result)].filter(Boolean);
}

const headings = (names) => h("thead", {}, h("tr", {}, names.map((name, i) => h("th", { class: i ? WIDE_ONLY.has(name) ? "wide" : null : "left", scope: "col" }, name))));
const WIDE_ONLY = new Set(["distance", "log distance", "from aspect"]);

/* The neighbours of an image's bucket, or the candidates among which it was chosen. */
function around(rule, width, height, result) {
  if (rule.kind === "set") {
    if (rule.sizes.length < 2) return null;
    const rows = neighbours(rule, width, height, 2), geometric = rule.switching === "geometric";
    const away = (n) => (geometric ? Math.abs(Math.log((n.bucket[0] / n.bucket[1]) / (width / height))) : n.distance);
    return scrolling("Neighbouring buckets", h("table", {}, headings(["neighbours", "aspect", geometric ? "log distance" : "distance", "would cut", "from aspect"]),
      h("tbody", {}, rows.map((n) => h("tr", { class: n.index === result.index ? "here" : null },
        h("th", { class: "left", scope: "row" }, size(n.bucket)), h("td", {}, (n.bucket[0] / n.bucket[1]).toFixed(4)), h("td", { class: "wide" }, away(n).toFixed(4)),
        h("td", {}, percent(n.loss)), h("td", { class: "wide" }, n.from === null ? "any" : n.from.toFixed(4)))))));
  }
  const fitted = rule.largest || rule.usual || rule.max_crop !== null;
  if (!result.candidates) return fitted ? null : h("p", { class: "soft" }, "Not larger than the area: it is not resized, only cut to whole steps.");
  return scrolling("Candidates", h("table", {}, headings(["candidates", "size", "aspect error"]),
    h("tbody", {}, result.candidates.map((c, i) => h("tr", { class: c.taken ? "here" : null },
      h("th", { class: "left", scope: "row" }, i ? "height to a step" : "width to a step"), h("td", {}, size(c.bucket)), h("td", {}, c.error.toFixed(4)))))));
}

/* Where the kept area lies in the resized image, over a box that shows all of it. */
function keptBox(result) {
  const { resized, bucket, cut } = result, kept = h("span", { class: "kept" });
  kept.style.left = `${(100 * cut[0]) / resized[0]}%`;
  kept.style.top = `${(100 * cut[1]) / resized[1]}%`;
  kept.style.width = `${(100 * bucket[0]) / resized[0]}%`;
  kept.style.height = `${(100 * bucket[1]) / resized[1]}%`;
  return kept;
}

/* What is done to an image in few words: its bucket, what is cut off, how much it is enlarged. */
const inShort = (bucket, loss, scale) =>
  `${size(bucket)}, ${loss ? `${percent(loss)} cut off` : "uncut"}${scale > 1.001 ? `, enlarged ×${scale.toFixed(2)}` : ""}`;

/* The resized image with the kept area outlined. `picture` makes a node for a box of a size. */
function preview(result, picture, longest = 190) {
  const { resized, bucket } = result;
  const unit = Math.min(longest / Math.max(resized[0], resized[1]), 1);
  const text = inShort(bucket, result.cropLoss, 1);
  const frame = h("div", { class: "frame", role: "img", "aria-label": `The image with what is kept outlined: ${text}` });
  frame.style.width = `${Math.max(8, resized[0] * unit)}px`;
  frame.style.height = `${Math.max(8, resized[1] * unit)}px`;
  if (picture) frame.append(picture(Math.max(8, resized[0] * unit), Math.max(8, resized[1] * unit)));
  frame.append(keptBox(result));
  return h("figure", { class: "preview" }, frame, h("figcaption", {}, text));
}
