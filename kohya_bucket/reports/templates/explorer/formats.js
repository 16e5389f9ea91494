/* The readers of `headers.js`. As in kohya_bucket.images.headers: what only a full decoder can tell is not guessed. */

const FRAMES = new Set([0xc0, 0xc1, 0xc2]);
const skipped = (marker) => marker === 0xc4 || marker === 0xdb || marker === 0xdd || marker === 0xfe || (marker >= 0xe0 && marker <= 0xef);

/* JPEG: segment after segment up to the first scan, as decoders do. */
async function readJpeg(pieces) {
  let at = 2, found = null, orientation = 1;
  for (let n = 0; n < 1024; n++) {
    const piece = await pieces.at(at, 10);
    if (piece.length < 10 || piece[0] !== 0xff) damaged("JPEG");
    const marker = piece[1], length = big(piece, 2, 2);
    if (length < 2) damaged("JPEG");
    if (skipped(marker)) {
      if (marker === 0xe1 && ascii(piece, 4, 6) === "Exif\0\0") orientation = await orientationAt(pieces, at + 10, Math.max(length - 8, 0));
    } else if (FRAMES.has(marker)) {
      if (found) damaged("JPEG");
      if (piece[4] !== 8 || ![1, 3, 4].includes(piece[9])) elsewhere("a JPEG of an unusual kind");
      found = { width: big(piece, 7, 2), height: big(piece, 5, 2) };
    } else if (marker === 0xda && found) {
      if (at + 2 + length > pieces.length) damaged("JPEG");
      return { ...found, orientation };
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

/* PNG: the checksums of the header and of eXIf must be right, and the pixels begin inside the file. */
async function readPng(pieces) {
  const { head } = pieces;
  if (head.length < 41 || big(head, 8, 4) !== 13 || ascii(head, 12, 4) !== "IHDR" || crc32(head.subarray(12, 29)) !== big(head, 29, 4)) damaged("PNG");
  if (!(DEPTHS[head[25]] || []).includes(head[24]) || head[26] || head[27]) damaged("PNG");
  let at = 33, orientation = 1;
  for (let n = 0; n < 256; n++) {
    const chunk = await pieces.at(at, 8);
    if (chunk.length < 8) damaged("PNG");
    const length = big(chunk, 0, 4), name = ascii(chunk, 4, 4);
    if (name === "IDAT") return { width: big(head, 16, 4), height: big(head, 20, 4), orientation };
    if (name === "eXIf") {
      const whole = await pieces.at(at + 4, Math.min(length, MOST_EXIF) + 8);
      if (length <= MOST_EXIF && (whole.length < length + 8 || crc32(whole.subarray(0, length + 4)) !== big(whole, length + 4, 4))) damaged("PNG");
      orientation = await orientationAt(pieces, at + 8, Math.min(length, MOST_EXIF));
    }
    at += 12 + length;
  }
  return damaged("PNG");
}

/* WebP: lossy, lossless, or extended, whose canvas is stored minus one. */
async function readWebp(pieces) {
  const { head } = pieces, kind = ascii(head, 12, 4), first = head[20];
  if (head.length < 30 || pieces.length < small(head, 4, 4) + 8) damaged("WebP");
  if (kind === "VP8X") {
    if (small(head, 16, 4) !== 10) damaged("WebP");
    const orientation = first & 0x08 ? await webpOrientation(pieces) : 1;
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

async function webpOrientation(pieces) {
  for (let at = 30, n = 0; n < 64; n++) {
    const chunk = await pieces.at(at, 8);
    if (chunk.length < 8) return 1;
    const length = small(chunk, 4, 4);
    if (ascii(chunk, 0, 4) === "EXIF") {
      const block = await pieces.at(at + 8, Math.min(length, MOST_EXIF));
      return orientationOf(ascii(block, 0, 6) === "Exif\0\0" ? block.subarray(6) : block);
    }
    at += 8 + length + (length % 2);
  }
  return 1;
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
