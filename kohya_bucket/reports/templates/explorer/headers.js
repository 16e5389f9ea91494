/* The stored size of an image from its header, read by File.slice; what cannot be told has a reason and no size. */

const HEAD = 16384, MOST_EXIF = 65536;
class Unreadable extends Error {}
const refuse = (why) => { throw new Unreadable(why); };
const damaged = (kind) => refuse(`its ${kind} header is damaged or cut off`);
const elsewhere = (what) => refuse(`${what}: not read in the browser; kohya-bucket analyze reads it`);

/* A file with its first bytes; `at` gives any others, fewer at the end. */
class Pieces {
  constructor(file, head) { this.file = file; this.head = head; this.length = file.size; this.last = { start: 0, bytes: head }; }

  static async of(file) { return new Pieces(file, new Uint8Array(await file.slice(0, HEAD).arrayBuffer())); }

  /* Of many files at once: a browser's message costs as much as 100 kB. One that cannot be read spoils it for all. */
  static async ofMany(files) {
    const bytes = new Uint8Array(await new Blob(files.map((file) => file.slice(0, HEAD))).arrayBuffer());
    let at = 0;
    const out = files.map((file) => new Pieces(file, bytes.subarray(at, at += Math.min(file.size, HEAD))));
    if (at !== bytes.length) refuse("a file has changed meanwhile");
    return out;
  }

  async at(offset, length) {
    if (offset + length <= this.head.length) return this.head.subarray(offset, offset + length);
    const { start, bytes } = this.last;
    if (offset >= start && offset + length <= start + bytes.length) return bytes.subarray(offset - start, offset - start + length);
    // Each reading costs far more than its bytes: some of what follows comes along.
    const more = new Uint8Array(await this.file.slice(offset, offset + Math.max(length, HEAD)).arrayBuffer());
    this.last = { start: offset, bytes: more };
    return more.subarray(0, length);
  }
}

const ascii = (bytes, at, length) => String.fromCharCode(...bytes.subarray(at, at + length));
const number = (little) => (bytes, at, length) => {
  let value = 0;
  for (let i = 0; i < length; i++) value = value * 256 + (bytes[little ? at + length - 1 - i : at + i] ?? 0);
  return value;
};
const big = number(false), small = number(true);

/* EXIF orientation from a TIFF block; 1 where there is none or it is damaged. */
function orientationOf(tiff) {
  const order = ascii(tiff, 0, 2), get = order === "II" ? small : order === "MM" ? big : null;
  if (!get || tiff.length < 8) return 1;
  const first = get(tiff, 4, 4);
  if (first + 2 > tiff.length) return 1;
  const entries = Math.min(get(tiff, first, 2), Math.floor((tiff.length - first - 2) / 12));
  for (let at = first + 2; at < first + 2 + 12 * entries; at += 12) {
    if (get(tiff, at, 2) !== 0x0112) continue;
    const kind = get(tiff, at + 2, 2), value = get(tiff, at + 8, 2);
    return kind === 3 && value >= 1 && value <= 8 ? value : 1;
  }
  return 1;
}

/* The same of a block in a file, of which the first entries are enough as a rule. */
async function orientationAt(pieces, offset, length) {
  const part = await pieces.at(offset, Math.min(length, 512)), get = ascii(part, 0, 2) === "II" ? small : big, first = get(part, 4, 4);
  const enough = first + 2 <= part.length && first + 2 + 12 * get(part, first, 2) <= part.length;
  return orientationOf(enough || part.length === length ? part : await pieces.at(offset, length));
}

/* Which reader takes a file with these first bytes. */
function readerOf(head) {
  const begins = (text, at = 0) => ascii(head, at, text.length) === text;
  if (begins("\x89PNG\r\n\x1a\n")) return readPng;
  if (begins("\xff\xd8\xff")) return readJpeg;
  if (begins("RIFF") && begins("WEBP", 8)) return readWebp;
  if (begins("GIF87a") || begins("GIF89a")) return readGif;
  if (begins("BM")) return readBmp;
  if (begins("ftyp", 4)) {
    const brands = [8, 16, 20, 24, 28].map((at) => ascii(head, at, 4));
    return brands.includes("avif") || brands.includes("avis") ? readAvif : () => elsewhere("a HEIC or another ISO file");
  }
  if (["II*\0", "MM\0*", "II+\0", "MM\0+"].some((mark) => begins(mark))) return () => elsewhere("a TIFF");
  if (begins("\xff\x0a") || begins("\0\0\0\x0cJXL ")) return () => elsewhere("a JPEG XL");
  return () => refuse("not an image that is known here");
}

const MOST_PIXELS = 178956970; // 2 * PIL.Image.MAX_IMAGE_PIXELS

/* {width, height, orientation} as stored, or {reason}. `begun`: pieces of the file, where its head was read already. */
async function readHeader(file, begun = null) {
  try {
    if (!file.size) refuse("an empty file (0 bytes)");
    const pieces = begun || await Pieces.of(file), found = await readerOf(pieces.head)(pieces);
    if (!(found.width > 0 && found.height > 0)) refuse(`its header says ${size([found.width, found.height])}`);
    if (found.width * found.height > MOST_PIXELS) refuse(`more than ${int(MOST_PIXELS)} pixels, which Pillow refuses`);
    return found;
  } catch (error) {
    if (error instanceof Unreadable) return { reason: error.message };
    return { reason: `it cannot be read: ${error.message || error.name}` };
  }
}
