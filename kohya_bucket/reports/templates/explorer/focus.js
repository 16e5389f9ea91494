/* Crops that keep the subject: the rule of kohya_bucket.buckets.focus in whole numbers, and the rows of a focus file. */

const SHARES = 10n ** 9n, TOLERANCE = 10n ** 6n;
const between = (x, low, high) => Math.min(Math.max(x, low), high);

/* A share in billionths, halves to even. */
function billionths(share) {
  const x = share * 1e9, low = Math.floor(x), over = x - low;
  return BigInt(over < 0.5 || (over === 0.5 && low % 2 === 0) ? low : low + 1);
}

/* The pixels that a rectangle in shares touches along one side: first, and first after it. */
function pixelsAlong(from, to, side) {
  const all = BigInt(side);
  let before = Number((billionths(from) * all + TOLERANCE) / SHARES), after = Number((billionths(to) * all - TOLERANCE + SHARES - 1n) / SHARES);
  if (after <= before) [before, after] = [after - 1, before + 1];
  return [between(before, 0, side - 1), between(after, 1, side)];
}

/* A placement with the crop that keeps most of a rectangle, and what of it the middle and this crop cut off, as shares. */
function keeping(result, box) {
  if (!box || !result.bucket) return result;
  const { resized, bucket } = result, axes = [0, 1].map((i) => pixelsAlong(box[i], box[i + 2], resized[i]));
  const excess = [0, 1].map((i) => Math.max(resized[i] - bucket[i], 0)), middle = excess.map((x) => Math.floor(x / 2));
  const crop = axes.map(([first, after], i) => {
    const last = after - bucket[i];
    return between(middle[i], between(Math.min(first, last), 0, excess[i]), between(Math.max(first, last), 0, excess[i]));
  });
  const whole = axes.reduce((area, [first, after]) => area * (after - first), 1);
  const lost = (at) => 1 - axes.reduce((area, [first, after], i) => area * Math.max(Math.min(after, at[i] + bucket[i]) - Math.max(first, at[i]), 0), 1) / whole;
  return { ...result, cut: [...crop, excess[0] - crop[0], excess[1] - crop[1]], focus: box, focusCut: { middle: lost(middle), now: lost(crop) } };
}

/* The four shares of a row; a point is a rectangle without width and height. Throws what is wrong with it. */
function boxOf(row) {
  if (!row || typeof row.image !== "string" || !row.image || !("focus" in row)) throw new TypeError('is not a row: write {"image": "a.jpg", "focus": [left, top, right, bottom]}');
  const shares = row.focus, said = `: the focus of ${row.image} is ${JSON.stringify(shares)}`;
  if (!Array.isArray(shares) || ![2, 4].includes(shares.length) || !shares.every(Number.isFinite)) throw new TypeError(`${said}, but must be [left, top, right, bottom] or [x, y], in shares of the picture`);
  if (Math.min(...shares) < 0) throw new TypeError(`${said}, which is negative`);
  if (Math.max(...shares) > 1) throw new TypeError(`${said}, which lies outside the picture: give shares from 0 to 1, not pixels`);
  const box = shares.length === 4 ? shares : [...shares, ...shares];
  if (box[0] > box[2] || box[1] > box[3]) throw new TypeError(`${said}, whose sides are swapped: give left, top, right, bottom`);
  return box;
}

const isPoint = (box) => box[0] === box[2] && box[1] === box[3];

/* A path's parts from those of a folder; a path from the root begins anew. */
function partsOf(path, folder = []) {
  const out = path[0] === "/" ? [""] : /^[A-Za-z]:\//.test(path) ? [] : [...folder];
  for (const part of path.split("/")) {
    if (part === ".." && out.length && !["", ".."].includes(out.at(-1))) out.pop();
    else if (part !== "." && part !== "") out.push(part);
  }
  return out;
}

/* Rows by the path of their image; those of images that are not here wait, and are kept. */
class FocusRows {
  constructor(images) {
    this.images = images;
    this.clear();
  }

  clear() {
    this.rows = new Map();
    this.loose = [];
    this.faults = [];
    this.name = this.several = this.dropped = null;
    this.taken = new Set();
    this.lies = null; // parts of the paths of the file's folder, and of the folder that the page's paths begin in
  }

  of(path) { return this.rows.has(path) ? boxOf(this.rows.get(path)) : null; }

  /* The rows of a JSON Lines file; `lies`: where it is known to lie. A row takes the place of what its image had. */
  load(text, name, lies = null) {
    this.dropped = this.loose.length ? `Let go with ${this.name}: ${int(this.loose.length)} rows of images that are not here.` : null;
    Object.assign(this, { name, lies, faults: [], loose: [], several: null, taken: new Set() });
    const names = new Set();
    text.replace(/^\ufeff/, "").split(/\r\n|\r|\n/).forEach((line, i) => {
      if (!line.trim()) return;
      try {
        const row = JSON.parse(line);
        boxOf(row);
        if (names.has(row.image)) throw new TypeError(`: ${row.image} has more than one focus; keep one, or one rectangle around all`);
        names.add(row.image);
        this.loose.push(row);
      } catch (error) {
        this.faults.push(`line ${i + 1}${error instanceof TypeError ? (error.message[0] === ":" ? "" : " ") + error.message : ` is not JSON: ${error.message}`}`);
      }
    });
    this.match();
  }

  /* Finds the images of rows that have none yet. */
  match() {
    if (!this.loose.length) return;
    this.lies ||= this.guess();
    if (!this.lies) return;
    const fold = (path) => (/^[A-Za-z]:/.test(this.lies.root[0] || "") ? path.toLowerCase() : path);
    const paths = new Map([...this.images.known].map((path) => [fold(path), path]));
    this.loose = this.loose.filter((row) => {
      const path = paths.get(fold(this.pathOf(row.image)));
      if (path === undefined) return true;
      if (this.taken.has(path)) this.faults.push(`${row.image}: ${path} has more than one focus`);
      else this.rows.set(path, row);
      this.taken.add(path);
      return false;
    });
  }

  /* Where the file must lie for most of its rows to name an image; null where that is nowhere, or in several places. */
  guess() {
    const foldersOf = new Map(), votes = new Map(); // folders by all ends of the paths in them
    const vote = (place) => { const key = JSON.stringify(place); votes.set(key, (votes.get(key) || 0) + 1); };
    for (const path of this.images.known) {
      const parts = path.split("/");
      for (let i = 0; i < parts.length; i++) {
        const end = parts.slice(i).join("/"), folders = foldersOf.get(end);
        if (folders) folders.push(parts.slice(0, i)); else foldersOf.set(end, [parts.slice(0, i)]);
      }
    }
    for (const { image } of this.loose) {
      const row = partsOf(image.replace(/\\/g, "/"));
      for (const folder of foldersOf.get(row.join("/")) || []) vote({ root: [], folder });
      for (let i = 1; i < row.length; i++) if (this.images.known.has(row.slice(i).join("/"))) vote({ root: row.slice(0, i), folder: [] });
    }
    const [best, second] = [...votes].sort((a, b) => b[1] - a[1]);
    this.several = second && second[1] === best[1] ? [best, second].map(([key]) => JSON.parse(key).folder.join("/") || "the top") : null;
    return best && !this.several ? JSON.parse(best[0]) : null;
  }

  /* The page's path of a row's image, and an image's name in a row. */
  pathOf(name) {
    const { root, folder } = this.lies, parts = partsOf(root[0] === "" ? name : name.replace(/\\/g, "/"), folder);
    return root.every((part, i) => part === parts[i]) ? parts.slice(root.length).join("/") : "";
  }

  nameOf(path) {
    const { root, folder } = this.lies || { root: [], folder: [] }, parts = [...root, ...path.split("/")];
    const same = folder.findIndex((part, i) => part !== parts[i]), n = same < 0 ? folder.length : same;
    return [...folder.slice(n).map(() => ".."), ...parts.slice(n)].join("/");
  }

  /* Sets an image's rectangle or point, or with null takes it away. */
  put(path, box) {
    if (box) this.rows.set(path, { ...this.rows.get(path), image: this.nameOf(path), focus: isPoint(box) ? box.slice(0, 2) : box });
    else this.rows.delete(path);
  }

  text() {
    const named = [...this.rows].map(([path, row]) => (this.lies && this.pathOf(row.image) === path ? row : { ...row, image: this.nameOf(path) }));
    return [...named, ...this.loose].map((row) => `${JSON.stringify(row)}\n`).join("");
  }

  /* What a reader is to know of the file, in lines. */
  notes() {
    const few = (list, n = 3) => `${list.slice(0, n).join(", ")}${list.length > n ? ` and ${int(list.length - n)} more` : ""}`, out = [];
    if (this.name) out.push(`${this.name}: ${plural(this.rows.size)} here ${this.rows.size === 1 ? "has" : "have"} a focus.`);
    if (this.dropped) out.push(this.dropped);
    if (this.several) out.push(`It fits ${this.several.join(" and ")} alike: drop the folder in which it lies.`);
    else if (this.loose.length) out.push(`Of images that are not here, kept when it is saved: ${few(this.loose.map((row) => row.image))}.`);
    return [...out, ...(this.faults.length ? [`Left out, and not saved: ${few(this.faults, 5)}.`] : [])];
  }
}
