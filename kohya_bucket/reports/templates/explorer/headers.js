/* The stored size of an image from its header, read by File.slice; what cannot be told has a reason and no size. */

const HEAD = 16384;
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

const text = (bytes) => new TextDecoder("latin1").decode(bytes);
const NONE = new Uint8Array();

const upright = (value) => (Number.isInteger(value) && value > 1 && value <= 8 ? value : 1);
const BYTES = { 1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8 }; // of a value, by its type
const NUMBERS = { 3: "Uint16", 4: "Uint32", 6: "Int8", 8: "Int16", 9: "Int32", 11: "Float32", 12: "Float64", 13: "Uint32", 16: "BigUint64" };

/* What Pillow's `exif_transpose` applies, 1 to 8, by a block of EXIF, or else by XMP. 1 where Pillow cannot read the block. */
function orientationOf(exif, xmp = NONE) {
  for (let n = 0; n < 2 && ascii(exif, 0, 6) === "Exif\0\0"; n++) exif = exif.subarray(6);
  if (!exif.length) return upright(+/tiff:Orientation(?:="|>)([0-9])/.exec(text(xmp))?.[1]);
  if (exif.length < 8 || !["II*\0", "II\0*", "MM\0*", "MM*\0", "MM\0+"].includes(ascii(exif, 0, 4))) return 1;
  const view = new DataView(exif.buffer, exif.byteOffset, exif.length), little = exif[0] === 0x49;
  const long = (at) => view.getUint32(at, little), short = (at) => view.getUint16(at, little);
  let at = long(4), left = exif.length;
  for (let n = at + 2 <= exif.length ? short(at) : 0, entry = at + 2; n && entry + 12 <= exif.length; n--, entry += 12) {
    const kind = short(entry + 2), bytes = long(entry + 4) * (BYTES[kind] || 0);
    at = entry + 8;
    if (bytes > 4) {
      if ((left -= bytes) < 0) continue;
      at = long(at);
      if (at + bytes > exif.length) break;
    }
    if (short(entry) !== 0x0112 || !bytes) continue;
    if (kind === 5 || kind === 10) return upright(long(at) / long(at + 4));
    return NUMBERS[kind] ? upright(Number(view[`get${NUMBERS[kind]}`](at, little))) : 1;
  }
  return orientationOf(NONE, xmp);
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
