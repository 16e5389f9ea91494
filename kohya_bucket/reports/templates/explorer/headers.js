/* The stored size of an image from its header, read by File.slice; what cannot be told has a reason and no size. */

const HEAD = 4096, MOST_EXIF = 65536;
class Unreadable extends Error {}
const refuse = (why) => { throw new Unreadable(why); };
const damaged = (kind) => refuse(`its ${kind} header is damaged or cut off`);
const elsewhere = (what) => refuse(`${what}: not read in the browser; kohya-bucket analyze reads it`);

/* A file with its first bytes; `at` gives any others, fewer at the end. */
class Pieces {
  constructor(file, head) { this.file = file; this.head = head; this.length = file.size; }

  static async of(file) { return new Pieces(file, new Uint8Array(await file.slice(0, HEAD).arrayBuffer())); }

  async at(offset, length) {
    if (offset + length <= this.head.length) return this.head.subarray(offset, offset + length);
    return new Uint8Array(await this.file.slice(offset, offset + length).arrayBuffer());
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

/* {width, height, orientation} as stored, or {reason}. */
async function readHeader(file) {
  try {
    if (!file.size) refuse("an empty file (0 bytes)");
    const pieces = await Pieces.of(file), found = await readerOf(pieces.head)(pieces);
    if (!(found.width > 0 && found.height > 0)) refuse(`its header says ${size([found.width, found.height])}`);
    return found.width > MOST || found.height > MOST ? refuse("its header says more pixels than any image has") : found;
  } catch (error) {
    if (error instanceof Unreadable) return { reason: error.message };
    return { reason: `it cannot be read: ${error.message || error.name}` };
  }
}
