"use strict";
/* Where an image lands: the same operations on the same doubles, in the same order, as kohya_bucket.buckets. */

const PLACED = 0, TOO_SMALL = 2, ASPECT_ERROR = 3, CROP_LIMIT = 4, NO_SMALLER_BUCKET = 7, TOO_LONG = 9;
const MOST = 2 ** 31 - 1;

const roundHalfUp = (x) => Math.floor(x + 0.5);

/* How many of the ascending thresholds are at or below `a`. */
function countBelow(thresholds, a) {
  let low = 0, high = thresholds.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (thresholds[middle] <= a) low = middle + 1; else high = middle;
  }
  return low;
}

function coverResize(width, height, bucket) {
  const wider = width / height > bucket[0] / bucket[1];
  const scale = (wider ? bucket[1] : bucket[0]) / (wider ? height : width);
  return [roundHalfUp(width * scale), roundHalfUp(height * scale)];
}

/* Scaled to cover its bucket, the image has a side beyond 32 bits. */
function tooLong(width, height, bucket) {
  const scale = Math.max(bucket[0] / width, bucket[1] / height);
  return Math.max(width * scale, height * scale) + 1 > MOST;
}

const cropLoss = (bucket, resized) => 1.0 - (bucket[0] * bucket[1]) / (resized[0] * resized[1]);

/* The crop box that sd-scripts hands to SDXL. */
function cropLtrb(bucket, aspect) {
  const bucketAspect = bucket[0] / bucket[1];
  const fitHeight = bucketAspect > aspect;
  const fittedWidth = fitHeight ? bucket[1] * aspect : bucket[0];
  const fittedHeight = fitHeight ? bucket[1] : bucket[0] / aspect;
  const left = Math.floor((bucket[0] - fittedWidth) * 0.5), top = Math.floor((bucket[1] - fittedHeight) * 0.5);
  return [left, top, left + fittedWidth, top + fittedHeight];
}

function cutPixels(resized, bucket) {
  const x = Math.max(resized[0] - bucket[0], 0), y = Math.max(resized[1] - bucket[1], 0);
  const left = Math.floor(x / 2), top = Math.floor(y / 2);
  return [left, top, x - left, y - top];
}

function outcome(width, height, bucket, resized) {
  const aspect = width / height;
  return {
    reason: PLACED, bucket, resized, aspectError: bucket[0] / bucket[1] - aspect, cropLoss: cropLoss(bucket, resized),
    cropLtrb: cropLtrb(bucket, aspect), cut: cutPixels(resized, bucket),
  };
}

const nowhere = (reason) => ({ reason, bucket: null, resized: null });

/* A given set: an exact size first, then the step function of the aspect, then the limits. */
function placeIntoSet(rule, width, height) {
  let index = rule.exact_first ? rule.sizes.findIndex((b) => b[0] === width && b[1] === height) : -1;
  if (index < 0) index = rule.order[countBelow(rule.thresholds, width / height)];
  if (rule.max_error !== null && Math.abs(rule.aspects[index] - width / height) >= rule.max_error) return nowhere(ASPECT_ERROR);
  const judge = (k) => {
    const bucket = rule.sizes[k];
    const loss = cropLoss(bucket, coverResize(width, height, bucket));
    const fits = !rule.no_upscale || (bucket[0] <= width && bucket[1] <= height);
    return { loss, fits };
  };
  const allowed = (loss) => rule.max_crop === null || loss <= rule.max_crop;
  if (rule.no_upscale || rule.max_crop !== null) {
    const first = judge(index);
    if (!(first.fits && allowed(first.loss))) {
      let best = -1, bestLoss = Infinity;
      for (const k of rule.by_area) {
        const { loss, fits } = judge(k);
        if (fits && loss < bestLoss) { best = k; bestLoss = loss; }
      }
      if (best < 0) return nowhere(NO_SMALLER_BUCKET);
      if (!allowed(bestLoss)) return nowhere(CROP_LIMIT);
      index = best;
    }
  }
  const bucket = rule.sizes[index];
  if (tooLong(width, height, bucket)) return nowhere(TOO_LONG);
  return { ...outcome(width, height, bucket, coverResize(width, height, bucket)), index };
}

/* sd-scripts' bucket_no_upscale: reduce to the area, floor a side to the step, floor both again. */
function withoutUpscaling(rule, width, height) {
  const steps = rule.steps, aspect = width / height;
  const floorToSteps = (x) => Math.floor(Math.floor(x + 0.5) / steps) * steps;
  let resized = [width, height], candidates = null;
  if (width * height > rule.max_area) {
    const idealWidth = Math.sqrt(rule.max_area * aspect);
    const byWidth = floorToSteps(idealWidth), byHeight = floorToSteps(rule.max_area / idealWidth);
    const heightExact = byWidth / aspect, widthExact = byHeight * aspect;
    const heightOfWidth = floorToSteps(heightExact), widthOfHeight = floorToSteps(widthExact);
    if (Math.min(heightOfWidth, byHeight) === 0) return nowhere(TOO_SMALL);
    const widthError = Math.abs(byWidth / heightOfWidth - aspect);
    const heightError = Math.abs(widthOfHeight / byHeight - aspect);
    const takeWidth = widthError < heightError;
    resized = takeWidth ? [byWidth, roundHalfUp(heightExact)] : [roundHalfUp(widthExact), byHeight];
    candidates = [
      { bucket: [byWidth, heightOfWidth], error: widthError, taken: takeWidth },
      { bucket: [widthOfHeight, byHeight], error: heightError, taken: !takeWidth },
    ];
  }
  if (Math.min(resized[0], resized[1]) < steps) return nowhere(TOO_SMALL);
  const bucket = resized.map((side) => Math.floor(side / steps) * steps);
  return { ...outcome(width, height, bucket, resized), candidates };
}

/* The bucket that an image would get with upscaling, where it fills it; else its own size, if that is within the area. */
function usualWhereFilled(rule, width, height) {
  const usual = placeIntoSet(rule.usual, width, height), bucket = usual.bucket || [Infinity, Infinity];
  if (bucket[0] <= width && bucket[1] <= height) return outcome(width, height, bucket, usual.resized);
  const own = [width - (width % rule.steps), height - (height % rule.steps)], area = own[0] * own[1];
  return area > 0 && area <= rule.max_area ? outcome(width, height, own, [width, height]) : withoutUpscaling(rule, width, height);
}

/* Opt-in corrections of the above: the largest fit, and a bound on what is cropped. */
const SLACK = 1e-12;
const aspectLoss = (bucketAspect, aspect) => 1.0 - Math.min(bucketAspect / aspect, aspect / bucketAspect);

function refit(rule, width, height) {
  const plain = (rule.usual ? usualWhereFilled : withoutUpscaling)(rule, width, height);
  if (!rule.largest && rule.max_crop === null) return plain;
  const { steps, max_crop: maxCrop } = rule, aspect = width / height, placed = plain.bucket !== null;
  const within = placed && (maxCrop === null || plain.cropLoss <= maxCrop);
  const untouched = within && plain.bucket[0] === width && plain.bucket[1] === height;
  const search = !untouched && (rule.largest || (placed && !within));
  let result = plain;
  const take = (size) => { result = outcome(width, height, size, coverResize(width, height, size)); };
  if (search && (placed || maxCrop !== null)) {
    const bound = within ? aspectLoss(plain.bucket[0] / plain.bucket[1], aspect) : 1.0;
    const found = largestSize(rule, width, height, bound);
    if (!(within && found[0] * found[1] < plain.bucket[0] * plain.bucket[1])) {
      if (found[0] > 0) take(found);
      else result = nowhere(Math.min(width, height) < steps ? TOO_SMALL : CROP_LIMIT);
    }
  }
  if (rule.largest && maxCrop === null && search && !placed) {
    const found = leastCropSize(rule, width, height);
    if (found[0] > 0) take(found);
  }
  return result;
}

function caps(rule, width, height) {
  const maxUnits = Math.floor(rule.max_area / (rule.steps * rule.steps));
  return [maxUnits, Math.min(Math.floor(width / rule.steps), maxUnits), Math.min(Math.floor(height / rule.steps), maxUnits)];
}

function largestSize(rule, imageWidth, imageHeight, bound) {
  const { steps, max_crop: maxCrop } = rule, aspect = imageWidth / imageHeight, maxLoss = bound + SLACK;
  const [maxUnits, capWidth, capHeight] = caps(rule, imageWidth, imageHeight);
  const reachable = maxCrop === null ? bound : Math.min(bound, maxCrop + 0.5 / steps);
  const leastKept = Math.max(1.0 - reachable - 2 * SLACK, 1e-9);
  let best = [0, 0], bestArea = 0, bestLoss = Infinity;
  let width = Math.min(capWidth, Math.trunc(Math.sqrt((maxUnits * aspect) / leastKept)) + 1);
  while (width >= 1 && capHeight >= 1) {
    const tallest = Math.trunc(width / (aspect * leastKept) + 1), shortest = Math.max((width * leastKept) / aspect - 1, 1);
    for (let height = Math.min(tallest, capHeight, Math.floor(maxUnits / width)); height >= shortest; height--) {
      const loss = aspectLoss(width / height, aspect), size = [width * steps, height * steps];
      if (loss > maxLoss) continue;
      if (maxCrop !== null && cropLoss(size, coverResize(imageWidth, imageHeight, size)) > maxCrop) continue;
      const area = width * height;
      if (area > bestArea || (area === bestArea && loss <= bestLoss + SLACK)) { best = size; bestArea = area; bestLoss = loss; }
      break;
    }
    const next = width - 1;
    const reach = next * Math.min(next / (aspect * leastKept) + 1, capHeight, maxUnits / Math.max(next, 1));
    if (!(width > 1 && reach >= bestArea)) break;
    width = next;
  }
  return best;
}

function leastCropSize(rule, imageWidth, imageHeight) {
  const aspect = imageWidth / imageHeight, [maxUnits, capWidth, capHeight] = caps(rule, imageWidth, imageHeight);
  let best = [0, 0], bestLoss = Infinity;
  for (let width = 1; width <= capWidth; width++) {
    const tallest = Math.min(capHeight, Math.floor(maxUnits / width)), floor = Math.trunc(width / aspect);
    if (tallest < 1) continue;
    for (const wanted of [floor, floor + 1]) {
      const height = Math.min(Math.max(wanted, 1), tallest), loss = aspectLoss(width / height, aspect);
      if (loss <= bestLoss + SLACK) { best = [width * rule.steps, height * rule.steps]; bestLoss = Math.min(bestLoss, loss); }
    }
  }
  return best;
}

const place = (rule, width, height) =>
  rule.kind === "set" ? placeIntoSet(rule, width, height) : refit(rule, width, height);

/* The steps of the aspect axis around the one an image falls on, narrow to wide. */
function neighbours(rule, width, height, reach) {
  const at = countBelow(rule.thresholds, width / height);
  const out = [];
  for (let j = Math.max(0, at - reach); j <= Math.min(rule.order.length - 1, at + reach); j++) {
    const bucket = rule.sizes[rule.order[j]];
    out.push({
      bucket, index: rule.order[j], distance: Math.abs(bucket[0] / bucket[1] - width / height),
      loss: cropLoss(bucket, coverResize(width, height, bucket)),
      from: j === 0 ? null : rule.thresholds[j - 1],
    });
  }
  return out;
}
