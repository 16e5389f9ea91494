/* Browsers turn an image as its EXIF asks, training does not: the tag is set to "upright" in a copy of the file. */

/* Where the TIFF block of a JPEG's, PNG's or WebP's EXIF begins; -1 where there is none. */
function exifStart(bytes) {
  const view = new DataView(bytes.buffer), text = (at, n) => String.fromCharCode(...bytes.subarray(at, at + n));
  const skipName = (at) => (text(at, 6) === "Exif\0\0" ? at + 6 : at);
  if (view.getUint16(0) === 0xffd8) {
    for (let at = 2; at + 4 < bytes.length && bytes[at] === 0xff; at += 2 + view.getUint16(at + 2)) {
      if (bytes[at + 1] === 0xe1 && text(at + 4, 6) === "Exif\0\0") return at + 10;
      if (bytes[at + 1] === 0xda) break;
    }
  } else if (text(1, 3) === "PNG") {
    for (let at = 8; at + 8 < bytes.length; at += 12 + view.getUint32(at)) if (text(at + 4, 4) === "eXIf") return at + 8;
  } else if (text(0, 4) === "RIFF" && text(8, 4) === "WEBP") {
    for (let at = 12; at + 8 < bytes.length; at += 8 + view.getUint32(at + 4, true) + (view.getUint32(at + 4, true) % 2)) {
      if (text(at, 4) === "EXIF") return skipName(at + 8);
    }
  }
  return -1;
}

function withoutOrientation(bytes) {
  try {
    const start = exifStart(bytes);
    if (start < 0) return bytes;
    const view = new DataView(bytes.buffer), little = bytes[start] === 0x49;
    const directory = start + view.getUint32(start + 4, little), entries = view.getUint16(directory, little);
    for (let at = directory + 2; at < directory + 2 + 12 * entries; at += 12) {
      if (view.getUint16(at, little) === 0x0112) view.setUint16(at + 8, 1, little);
    }
  } catch { /* a damaged block asks for nothing */ }
  return bytes;
}

const asStored = async (file) => createImageBitmap(new Blob([withoutOrientation(new Uint8Array(await file.arrayBuffer()))]));

