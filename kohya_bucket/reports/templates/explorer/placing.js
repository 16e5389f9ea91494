/* Images to buckets, and what is to be said of each bucket and of all. */

const FAR = 0.25, MUCH = 0.1;

/* Of ascending values, as numpy interpolates; 0 of none. */
function quantile(sorted, share) {
  if (!sorted.length) return 0;
  const at = (sorted.length - 1) * share, low = Math.floor(at), t = at - low, a = sorted[low], b = sorted[Math.min(low + 1, sorted.length - 1)];
  return t >= 0.5 ? b - (b - a) * (1 - t) : a + (b - a) * t;
}

/* Places `items` as `placed(item)` says in short turns; false where `current()` no longer holds. */
async function placeAll(items, placed, current) {
  for (const item of items) {
    if (!item.reason) {
      const found = placed(item), { bucket } = found;
      item.bucket = bucket;
      item.why = found.reason;
      item.focusCut = found.focusCut;
      if (bucket) {
        item.loss = found.cropLoss;
        item.scale = found.resized[item.width >= item.height ? 0 : 1] / Math.max(item.width, item.height);
        item.away = Math.abs(Math.log((bucket[0] / bucket[1]) / (item.width / item.height)));
      }
    }
    await breathe();
    if (!current()) return false;
  }
  return true;
}

/* Per bucket: its images, the one that loses most first, samples, batches, crops. */
async function gather(items, batchSize, current) {
  const buckets = new Map(), unplaced = [], bad = [], losses = [];
  let enlarged = 0;
  for (const item of items) {
    if (item.reason) bad.push(item);
    else if (!item.bucket) unplaced.push(item);
    else {
      const key = item.bucket[0] * 65536 + item.bucket[1];
      if (!buckets.has(key)) buckets.set(key, { bucket: item.bucket, items: [], samples: 0, loss: 0, worst: 0, enlarged: 0 });
      const into = buckets.get(key);
      into.items.push(item);
      into.samples += item.group.repeats;
      into.loss += item.loss;
      into.worst = Math.max(into.worst, item.loss);
      losses.push(item.loss);
      if (item.scale > 1.001) { into.enlarged++; enlarged++; }
    }
    await breathe();
    if (!current()) return null;
  }
  const list = [...buckets.values()].sort((a, b) => b.items.length - a.items.length || a.bucket[0] - b.bucket[0]);
  let batches = 0, short = 0;
  for (const one of list) {
    one.items.sort((a, b) => b.loss - a.loss || (a.path < b.path ? -1 : 1));
    one.batches = Math.ceil(one.samples / batchSize);
    one.last = one.samples % batchSize;
    one.mean = one.loss / one.items.length;
    batches += one.batches;
    short += one.last ? 1 : 0;
    await breathe();
  }
  losses.sort((a, b) => a - b);
  const placed = losses.length, mean = losses.reduce((sum, x) => sum + x, 0) / Math.max(placed, 1);
  return { buckets: list, unplaced, bad, placed, mean, p95: quantile(losses, 0.95), worst: quantile(losses, 1), enlarged, batches, short };
}

/* Counts over log2 of the aspect, as `kohya_bucket.reports.page.aspect_histogram` makes them. */
function aspectHistogram(items, bins = 160) {
  const logs = Float64Array.from(items.filter((item) => !item.reason), (item) => Math.log2(item.width / item.height)).sort();
  if (!logs.length) return { reach: 1.5, counts: new Array(bins).fill(0), beyond: 0 };
  const tails = Math.max(Math.abs(quantile(logs, 0.001)), Math.abs(quantile(logs, 0.999)));
  const reach = Math.min(Math.max(tails * 1.05, 1), 5), counts = new Array(bins).fill(0);
  let beyond = 0;
  for (const log of logs) {
    counts[Math.min(bins - 1, Math.max(0, Math.floor(((log + reach) / (2 * reach)) * bins)))]++;
    if (Math.abs(log) > reach) beyond++;
  }
  return { reach, counts, beyond };
}

/* What stands out, by name: which images, and in words. */
const VIEWS = [
  { name: "All images", about: "Every image in its bucket.", has: (item) => !item.reason },
  { name: "Cut off most", about: "More than 10% is cut off.", has: (item) => item.bucket && item.loss > MUCH },
  { name: "Enlarged", about: "Smaller than their bucket: they are scaled up.", has: (item) => item.bucket && item.scale > 1.001 },
  { name: "With a focus", about: "Their crop keeps most of a rectangle.", has: (item) => item.bucket && item.focusCut },
  { name: "Focus cut off", about: "Their bucket does not hold the whole rectangle.", has: (item) => item.bucket && item.focusCut?.now > 0 },
  { name: "Far from every bucket", about: "The aspect differs from the bucket's by more than a factor of 1.28: often a mistake in the data.", has: (item) => item.bucket && item.away > FAR },
  { name: "Without a bucket", about: "These are not trained.", has: (item) => !item.reason && !item.bucket },
  { name: "Asking for a rotation", about: "Their EXIF asks for it; training takes the pixels as they are stored, and so does this page.", has: (item) => !item.reason && item.orientation > 1 },
];

/* In what order images are shown: `sections(buckets, has)` makes {id, title, about, items} of those that `has` holds for. */
const inBuckets = (buckets, has) => buckets.map((b) => ({ id: `bucket-${size(b.bucket)}`, title: size(b.bucket), items: b.items.filter(has), bucket: b })).filter((one) => one.items.length)
  .map((one) => ({ ...one, about: cutOff(one.items.length, one.bucket.mean, one.bucket.worst) }));
const together = (title, value) => (buckets, has) => {
  const items = buckets.flatMap((b) => b.items.filter(has)).sort((a, b) => value(b) - value(a) || (a.path < b.path ? -1 : 1));
  return items.length ? [{ id: "in-order", title, items, about: `${images(items.length)} of all buckets` }] : [];
};
const ORDERS = [
  { name: "Fullest bucket", sections: inBuckets },
  { name: "Most cut off", sections: together("Most cut off first", (item) => item.loss) },
  { name: "Most enlarged", sections: together("Most enlarged first", (item) => item.scale) },
];

/* The sections that hold the first `most` images. */
const FIRST_IMAGES = 12; // on a phone, where what follows is to be within reach
function firstOf(sections, most) {
  const out = [];
  let left = most;
  for (const one of sections) {
    if (left <= 0) break;
    out.push({ ...one, items: one.items.slice(0, left) });
    left -= one.items.length;
  }
  return out;
}
