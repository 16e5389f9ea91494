/* AVIF: the size (`ispe`) of the item that `pitm` names; one that is cut when shown is not read. */

function* boxes(bytes, at, end) {
  while (at + 8 <= end) {
    const length = big(bytes, at, 4);
    if (length < 8 || at + length > end) damaged("AVIF");
    yield { kind: ascii(bytes, at + 4, 4), at: at + 8, end: at + length };
    at += length;
  }
}

const inside = (bytes, box, skip, kind) => [...boxes(bytes, box.at + skip, box.end)].find((one) => one.kind === kind) || damaged("AVIF");

async function readAvif(pieces) {
  let at = 0, box = null;
  for (let n = 0; n < 16; n++) {
    const top = await pieces.at(at, 8), length = big(top, 0, 4);
    if (top.length < 8 || length < 8) damaged("AVIF");
    if (ascii(top, 4, 4) === "meta") { box = { at: 12, end: length }; break; }
    at += length;
  }
  if (!box || box.end > 1 << 20) elsewhere("an AVIF of an unusual kind");
  const bytes = await pieces.at(at, box.end);
  if (bytes.length < box.end) damaged("AVIF");
  const primary = inside(bytes, box, 0, "pitm"), wide = bytes[primary.at] ? 4 : 2, wanted = big(bytes, primary.at + 4, wide);
  const properties = inside(bytes, box, 0, "iprp"), container = inside(bytes, properties, 0, "ipco");
  const known = [...boxes(bytes, container.at, container.end)];
  const mine = ownProperties(bytes, inside(bytes, properties, 0, "ipma"), wanted).map((i) => known[i - 1]).filter(Boolean);
  const { irot, imir, clap } = Object.fromEntries(mine.map((one) => [one.kind, one]));
  if (clap) elsewhere("an AVIF that is cut when shown");
  const axis = imir && bytes[imir.at] & 1, turns = irot ? bytes[irot.at] & 3 : 0;
  const orientation = (imir ? (axis ? [2, 7, 4, 5] : [4, 5, 2, 7]) : [1, 8, 3, 6])[turns];
  // Where nothing else turns it, Pillow goes by its XMP.
  if (orientation === 1 && text(bytes).includes("rdf+xml") && /tiff:Orientation/.test(text(await pieces.at(0, pieces.length)))) elsewhere("an AVIF whose XMP has an orientation");
  const sizes = mine.filter((one) => one.kind === "ispe" && one.end - one.at === 12);
  if (sizes.length !== 1) damaged("AVIF");
  return { width: big(bytes, sizes[0].at + 4, 4), height: big(bytes, sizes[0].at + 8, 4), orientation };
}

/* Numbers, from 1, of the properties of an item. */
function ownProperties(bytes, box, wanted) {
  const itemBytes = bytes[box.at] ? 4 : 2, twoBytes = bytes[box.at + 3] & 1, count = big(bytes, box.at + 4, 4);
  let at = box.at + 8;
  for (let i = 0; i < count && at < box.end; i++) {
    const item = big(bytes, at, itemBytes), own = bytes[at + itemBytes], step = twoBytes ? 2 : 1;
    at += itemBytes + 1;
    if (item === wanted) return Array.from({ length: own }, (_, k) => (twoBytes ? big(bytes, at + 2 * k, 2) & 0x7fff : bytes[at + k] & 0x7f));
    at += own * step;
  }
  return damaged("AVIF");
}
