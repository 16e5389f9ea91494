/* The readers of `headers.js`. As in kohya_bucket.images.headers: what only a full decoder can tell is not guessed. */

const FRAMES = new Set([0xc0, 0xc1, 0xc2]);
const skipped = (marker) => marker === 0xc4 || marker === 0xdb || marker === 0xdd || marker === 0xfe || (marker >= 0xe0 && marker <= 0xef);

/* JPEG: segment after segment up to the first scan, as decoders do. */
async function readJpeg(pieces) {
  let at = 2, found = null, exif = NONE, xmp = [0, 0];
  for (let n = 0; n < 1024; n++) {
    const piece = await pieces.at(at, 10);
    if (piece.length < 10 || piece[0] !== 0xff) damaged("JPEG");
    const marker = piece[1], length = big(piece, 2, 2);
    if (length < 2) damaged("JPEG");
    if (skipped(marker)) {
      if (marker === 0xe1 && ascii(piece, 4, 6) === "Exif\0\0") {
        const part = (await pieces.at(at + 10, length + HEAD)).subarray(0, Math.max(length - 8, 0)); // what follows comes along
        exif = exif.length ? new Uint8Array([...exif, ...part]) : part;
      } else if (marker === 0xe1 && text(await pieces.at(at + 4, 29)) === "http://ns.adobe.com/xap/1.0/\0") xmp = [at + 33, length - 31];
    } else if (FRAMES.has(marker)) {
      if (found) damaged("JPEG");
      if (piece[4] !== 8 || ![1, 3, 4].includes(piece[9])) elsewhere("a JPEG of an unusual kind");
      found = { width: big(piece, 7, 2), height: big(piece, 5, 2) };
    } else if (marker === 0xda && found) {
      if (at + 2 + length > pieces.length) damaged("JPEG");
      return { ...found, orientation: orientationOf(exif, await pieces.at(...xmp)) };
    } else if (marker >= 0xc3 && marker <= 0xcf) elsewhere("a JPEG of an unusual kind");
    else damaged("JPEG");
    at += 2 + length;
  }
  return damaged("JPEG");
}

const DEPTHS = { 0: [1, 2, 4, 8, 16], 2: [8, 16], 3: [1, 2, 4, 8], 4: [8, 16], 6: [8, 16] };

function crc32(bytes) {
  let sum = -1;
  for (const byte of bytes) {
    sum ^= byte;
    for (let i = 0; i < 8; i++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
}

const TEXTS = ["tEXt", "zTXt", "iTXt", "iCCP"], MOST_TEXT = 1 << 20; // bytes of one, unpacked, that Pillow reads
const TELLING = /^(?:Raw profile type exif|XML:com\.adobe\.xmp|exif|xmp)\0/;

/* PNG: the header's checksum must be right, and the pixels begin inside the file. */
async function readPng(pieces) {
  const { head } = pieces, chunks = [];
  if (head.length < 41 || big(head, 8, 4) !== 13 || ascii(head, 12, 4) !== "IHDR" || crc32(head.subarray(12, 29)) !== big(head, 29, 4)) damaged("PNG");
  if (!(DEPTHS[head[25]] || []).includes(head[24]) || head[26] || head[27]) damaged("PNG");
  let pixels = false, telling = false;
  for (let at = 33, n = 0; n < 16384; n++) {
    const chunk = await pieces.at(at, 8), length = big(chunk, 0, 4), name = ascii(chunk, 4, 4);
    if (chunk.length < 8 || name === "IEND" || (pixels && name === "fcTL")) break;
    if (name === "IDAT" && !pixels) {
      pixels = true;
      // All but the last are of one length as a rule: then nothing is behind them.
      const last = at + Math.floor(Math.max(0, pieces.length - 13 - at) / (12 + length)) * (12 + length), piece = await pieces.at(last, 8);
      if (ascii(piece, 4, 4) === "IDAT" && last + 24 + big(piece, 0, 4) === pieces.length) break;
    }
    if (!pixels || name === "eXIf" || TEXTS.includes(name)) chunks.push({ name, at, length });
    telling ||= name === "eXIf" || (TEXTS.includes(name) && ((name !== "tEXt" && length > 1000) || TELLING.test(ascii(await pieces.at(at + 8, 32), 0, 32))));
    at += 12 + length;
  }
  if (!pixels) damaged("PNG");
  return { width: big(head, 16, 4), height: big(head, 20, 4), orientation: telling ? await pngOrientation(pieces, chunks) : 1 };
}

/* The orientation in a PNG's EXIF or texts. As in Pillow, the last of a name counts, and no checksum may be wrong. */
async function pngOrientation(pieces, chunks) {
  const found = {};
  for (const { name, at, length } of chunks) {
    const whole = await pieces.at(at + 4, length + 8), data = whole.subarray(4, 4 + length), end = data.indexOf(0);
    if (whole.length < length + 8 || !/^[a-z]{4}$/i.test(name) || crc32(whole.subarray(0, 4 + length)) !== big(whole, 4 + length, 4)) damaged("PNG");
    if (name === "eXIf") found.exif = data;
    if (!TEXTS.includes(name) || end < 1) continue;
    // The text's name ends at `end`. What follows up to its value: of iTXt two bytes and two ends, of packed kinds a byte.
    const packed = name === "iTXt" ? data[end + 1] : name !== "tEXt", from = (name === "iTXt" ? data.indexOf(0, data.indexOf(0, end + 3) + 1) : end + packed) + 1;
    const value = packed ? await unpacked(data.subarray(from)) : data.subarray(from);
    if (name !== "iCCP") found[text(data.subarray(0, end))] = value;
  }
  // A raw profile is its kind and its length, then the block in lines of hexadecimal digits.
  const { exif, "Raw profile type exif": raw, "XML:com.adobe.xmp": xmp } = found, hex = raw && text(raw).split("\n").slice(3).join("");
  if (raw && !/^(?:\s*[\da-f]{2})*\s*$/i.test(hex)) return exif ? orientationOf(exif, xmp) : 1;
  return orientationOf(exif || Uint8Array.from((hex || "").match(/[\da-f]{2}/gi) || [], (two) => parseInt(two, 16)), xmp);
}

async function unpacked(bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader(), parts = [];
  let length = 0;
  try {
    for (let part; length <= MOST_TEXT && !(part = await reader.read()).done; length += part.value.length) parts.push(part.value);
  } catch { elsewhere("a PNG with a damaged text"); }
  return length > MOST_TEXT ? refuse("its text or profile is larger than Pillow reads") : new Uint8Array(await new Blob(parts).arrayBuffer());
}

/* WebP: lossy, lossless, or extended, whose canvas is stored minus one. */
async function readWebp(pieces) {
  const { head } = pieces, kind = ascii(head, 12, 4), first = head[20];
  if (head.length < 30 || pieces.length < small(head, 4, 4) + 8) damaged("WebP");
  if (kind === "VP8X") {
    if (small(head, 16, 4) !== 10) damaged("WebP");
    const orientation = first & 0x0c ? await webpOrientation(pieces, first) : 1;
    return { width: small(head, 24, 3) + 1, height: small(head, 27, 3) + 1, orientation };
  }
  if (kind === "VP8 ") {
    if ((first & 0x11) !== 0x10 || ascii(head, 23, 3) !== "\x9d\x01\x2a") damaged("WebP");
    return { width: small(head, 26, 2) & 0x3fff, height: small(head, 28, 2) & 0x3fff, orientation: 1 };
  }
  if (kind !== "VP8L" || first !== 0x2f || head[24] >> 5) damaged("WebP");
  const packed = small(head, 21, 4);
  return { width: (packed & 0x3fff) + 1, height: ((packed >>> 14) & 0x3fff) + 1, orientation: 1 };
}

async function webpOrientation(pieces, flags) {
  let exif = [0, 0], xmp = [0, 0];
  for (let at = 30, n = 0; n < 64; n++) {
    const chunk = await pieces.at(at, 8), length = small(chunk, 4, 4), name = ascii(chunk, 0, 4);
    if (chunk.length < 8) break;
    if (name === "EXIF" && flags & 0x08 && !exif[1]) exif = [at + 8, length];
    if (name === "XMP " && flags & 0x04 && !xmp[1]) xmp = [at + 8, length];
    at += 8 + length + (length % 2);
  }
  return orientationOf(await pieces.at(...exif), await pieces.at(...xmp));
}

/* Pillow, which judges these, refuses more. */
const bounded = (found) => (found.width * found.height > 178_956_970 ? refuse("more than 178,956,970 pixels, which Pillow refuses") : found);

/* GIF: its screen, which a first frame that sticks out of it enlarges. */
async function readGif(pieces) {
  const { head } = pieces;
  if (head.length < 13) damaged("GIF");
  let width = small(head, 6, 2), height = small(head, 8, 2), at = 13 + (head[10] & 0x80 ? 3 << ((head[10] & 7) + 1) : 0);
  for (let n = 0; n < 4096; n++) {
    const piece = await pieces.at(at, 10);
    if (piece[0] === 0x2c && piece.length === 10) {
      width = Math.max(width, small(piece, 1, 2) + small(piece, 5, 2));
      height = Math.max(height, small(piece, 3, 2) + small(piece, 7, 2));
      const pixels = at + 10 + (piece[9] & 0x80 ? 3 << ((piece[9] & 7) + 1) : 0);
      return pixels < pieces.length ? bounded({ width, height, orientation: 1 }) : damaged("GIF");
    }
    if (piece[0] !== 0x21 || piece.length < 4 || (piece[1] === 0xf9 && piece[2] < 4)) damaged("GIF");
    for (at += 2; ; n++) {
      const length = (await pieces.at(at, 1))[0];
      if (length === undefined || n > 4096) damaged("GIF");
      at += length + 1;
      if (!length) break;
    }
  }
  return damaged("GIF");
}

/* BMP: of the header's kinds those that everybody writes. */
async function readBmp({ head, length }) {
  const kind = small(head, 14, 4), unusual = () => elsewhere("a BMP of an unusual kind");
  if (head.length < 26) damaged("BMP");
  if (kind === 12) {
    return [1, 4, 8, 24].includes(small(head, 24, 2)) ? { width: small(head, 18, 2), height: small(head, 20, 2), orientation: 1 } : unusual();
  }
  if (![40, 52, 56, 64, 108, 124].includes(kind) || length < 14 + kind) unusual();
  const height = small(head, 22, 4), depth = small(head, 28, 2), packing = small(head, 30, 4), colours = small(head, 46, 4);
  const masks = [54, 58, 62].map((at) => small(head, at, 4)).join();
  const usual = packing === 0 ? [1, 4, 8, 16, 24, 32].includes(depth) : packing === 3 && depth === 32 && masks === "16711680,65280,255" && kind === 40;
  if (!usual || colours > 256 || (depth <= 8 && length < 14 + kind + 4 * (colours || 1 << depth))) unusual();
  return bounded({ width: small(head, 18, 4), height: head[25] === 0xff ? 2 ** 32 - height : height, orientation: 1 });
}
