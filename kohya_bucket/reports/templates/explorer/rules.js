/* The rule that settings stand for: sd-scripts' set and its switching points, as kohya_bucket.buckets makes them. */

/* For each width from `low` in steps the largest height within the area, the transpose, and the square. */
function kohyaSizes(area, low, high, steps) {
  const root = Math.sqrt(area), side = Math.trunc((root - (root % steps)) / steps) * steps;
  const sizes = new Map([[`${side},${side}`, [side, side]]]);
  const add = (w, t) => sizes.set(`${w},${t}`, [w, t]);
  for (let width = low; width <= Math.min(high, Math.floor(area / Math.max(low, 1))); width += steps) {
    const height = Math.min(high, Math.floor(Math.floor(area / width) / steps) * steps);
    if (height >= low) { add(width, height); add(height, width); }
  }
  return [...sizes.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

/* All sizes in steps whose tokens, and so pixels, differ from `area` by at most the share `tolerance`; the nearest first. */
function tokenBandSizes(area, tolerance, low, high, steps) {
  const least = Math.ceil(area * (1 - tolerance)), most = Math.floor(area * (1 + tolerance)), first = Math.max(low, steps), sizes = [];
  for (let width = first; width <= Math.min(high, Math.floor(most / first)); width += steps) {
    const shortest = Math.max(first, Math.ceil(Math.ceil(least / width) / steps) * steps);
    for (let height = shortest; height <= Math.min(high, Math.floor(most / width)); height += steps) sizes.push([width, height]);
  }
  const far = (b) => Math.abs(b[0] * b[1] - area);
  return sizes.sort((a, b) => far(a) - far(b) || a[0] - b[0] || a[1] - b[1]);
}

/* Positive doubles order like their bit patterns: bisection over these ends at the first one at which `holds`. */
const bits = new DataView(new ArrayBuffer(8));
const toBits = (x) => { bits.setFloat64(0, x); return bits.getBigInt64(0); };
const fromBits = (n) => { bits.setBigInt64(0, n); return bits.getFloat64(0); };
function firstDouble(holds, low, high) {
  let below = toBits(low), above = toBits(high);
  while (above - below > 1n) {
    const middle = below + (above - below) / 2n;
    if (holds(fromBits(middle))) above = middle; else below = middle;
  }
  return fromBits(above);
}

/* Where a narrower bucket `a` hands over to its neighbour `b`; `first`: at a tie `a` stays. */
const SWITCHING = {
  midpoint(a, b, first) {
    const left = a[0] / a[1], right = b[0] / b[1];
    return firstDouble((x) => {
      const toLeft = Math.abs(left - x), toRight = Math.abs(right - x);
      return toRight < toLeft || (toRight === toLeft && !first);
    }, left, right);
  },
  geometric(a, b, first) {
    const left = a[0] / a[1], right = b[0] / b[1], product = left * right;
    return firstDouble((x) => x * x > product || (x * x === product && !first), left, right);
  },
  area(a, b) {
    const gain = a[0] * a[1] - b[0] * b[1], cross = a[1] * b[0];
    const root = (gain + Math.sqrt(gain * gain + cross * cross)) / (a[1] * a[1]);
    const lowest = fromBits(toBits(a[0] / a[1]) + 1n);
    return Math.min(Math.max(root, lowest), b[0] / b[1]);
  },
};

/* A set as `placement.js` takes it. */
function setRule(sizes, switching, noUpscale, maxCrop) {
  const aspects = sizes.map((b) => b[0] / b[1]), seen = new Set();
  const order = sizes.map((_, k) => k).sort((i, j) => aspects[i] - aspects[j] || i - j)
    .filter((k) => !seen.has(aspects[k]) && seen.add(aspects[k]));
  const thresholds = order.slice(1).map((k, j) => SWITCHING[switching](sizes[order[j]], sizes[k], order[j] < k));
  const byArea = sizes.map((_, k) => k).sort((i, j) => sizes[j][0] * sizes[j][1] - sizes[i][0] * sizes[i][1] || i - j);
  return {
    kind: "set", sizes, order, thresholds, switching, no_upscale: noUpscale, max_crop: maxCrop, by_area: byArea,
    exact_first: true, aspects: null, max_error: null,
  };
}

const MOST_SIDE = 16384, MOST_WIDTHS = 4096;

/* Why settings cannot be trained with, in one line; null where they can. `low` and `high` are as sd-scripts rounds them. */
function whyNot([width, height], low, high, steps, ownSizes) {
  const shorter = Math.min(width, height), longer = Math.max(width, height);
  if (width * height < steps * steps) return `resolution ${width}×${height} is smaller than one step of ${steps}: no bucket fits`;
  if (ownSizes && low <= shorter && longer <= high) return null;
  if (low < 1) return `min_bucket_reso is below one step of ${steps}, of which every side is a multiple: take ${steps}`;
  if (low > high) return `min_bucket_reso ${low} is above max_bucket_reso ${high}: no side fits between`;
  if (shorter < low) return `min_bucket_reso ${low} is above the shorter side of resolution ${width}×${height}: lower it, or raise the resolution`;
  if (longer > high) return `max_bucket_reso ${high} is below the longer side of resolution ${width}×${height}: raise it to ${longer + ((steps - (longer % steps)) % steps)}`;
  if ((Math.min(high, (width * height) / low) - low) / steps > MOST_WIDTHS) return `these are more than ${int(MOST_WIDTHS)} widths: too many to show; raise bucket_reso_steps`;
  return null;
}

/* {rule} or {error} for settings; `sets` are the bundled sets: {name: sizes}. */
function ruleOf(settings, sets) {
  const { resolution, steps, min, max, noUpscale, buckets, switching, maxCrop, fit } = settings;
  for (const [name, value] of [["resolution", resolution[0]], ["resolution", resolution[1]], ["bucket_reso_steps", steps], ["max_bucket_reso", max]]) {
    if (!Number.isInteger(value) || value < 1) return { error: `${name} must be a whole number of 1 or more` };
  }
  if (!Number.isInteger(min)) return { error: "min_bucket_reso must be a whole number" };
  if (Math.max(...resolution) > MOST_SIDE) return { error: `resolution ${size(resolution)}: at most ${int(MOST_SIDE)} pixels a side are shown here` };
  if (maxCrop !== null && !(maxCrop >= 0 && maxCrop < 1)) return { error: "max_crop is a share of the image: at least 0 and below 1, e.g. 0.05" };
  if (buckets === "none") return { rule: setRule([resolution], "midpoint", false, null) };
  const low = min - (min % steps), high = max + ((steps - (max % steps)) % steps);
  if (buckets === "token_band") {
    const sizes = tokenBandSizes(resolution[0] * resolution[1], settings.tolerance, low, high, steps);
    return sizes.length ? { rule: setRule(sizes, switching || "geometric", noUpscale, maxCrop) } : { error: `no size in steps of ${steps} has about the tokens of ${size(resolution)}: lower bucket_reso_steps` };
  }
  if (buckets !== "kohya") {
    const odd = sets[buckets].find((b) => b[0] % steps || b[1] % steps);
    return odd ? { error: `${buckets} holds ${size(odd)}, no multiple of bucket_reso_steps ${steps}` } : { rule: setRule(sets[buckets], switching || "geometric", noUpscale, maxCrop) };
  }
  const standard = noUpscale && fit === "standard", error = whyNot(resolution, low, high, steps, noUpscale && !standard);
  if (error) return { error };
  if (!noUpscale && fit !== "kohya") return { error: `no_upscale_fit is ${fit}, but upscaling is on: set bucket_no_upscale` };
  const area = resolution[0] * resolution[1], usual = (crop) => setRule(kohyaSizes(area, low, high, steps), switching || "midpoint", false, crop);
  if (!noUpscale) return { rule: usual(maxCrop) };
  return { rule: { kind: "no_upscale", largest: fit === "largest", usual: standard ? usual(null) : null, max_area: area, steps, max_crop: maxCrop } };
}
