"""The stored size of an image file, from its header: what `PIL.Image.open(path).size` says, several times faster.

Stored means before any rotation by EXIF, since sd-scripts loads pixels unrotated. PNG, JPEG and WebP are read here;
Pillow reads all other formats, and decides wherever one of these readers is unsure.
"""

from __future__ import annotations

import os
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from zlib import crc32, decompressobj, error

from kohya_bucket.images.formats import MAX_SIDE, HeaderRow, ImageFormat, UnreadableImageError, explain_os_error, sniff
from kohya_bucket.images.remote import HEAD_BYTES, HeaderFile, Opened, Pieces, RemoteFile, is_url, length_of, read_at
from kohya_bucket.inputs import READING

ORIENTATIONS = {
    2: "mirrored left to right",
    3: "upside down",
    4: "mirrored top to bottom",
    5: "mirrored, a quarter turn",
    6: "a quarter turn clockwise",
    7: "mirrored, a quarter turn",
    8: "a quarter turn anticlockwise",
}
"""What each orientation but 1 means; sd-scripts ignores it."""

_ORIENTATION, _SHORT = 0x0112, 3
_ENTRY = 12
_TYPES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}  # bytes of a value
_Unpack = Callable[[bytes, int], tuple[int, ...]]


def _reading(order: str, shift: int) -> tuple[_Unpack, _Unpack, _Unpack, int]:
    return (*(struct.Struct(order + kinds).unpack_from for kinds in ("I", "H", "HHII")), shift)  # type: ignore[return-value]


# Byte order by the first bytes of a block; the shift leads to the first two of four bytes.
_BLOCKS = {b"II*\0": _reading("<", 0), b"MM\0*": _reading(">", 16)}


def exif_orientation(tiff: bytes) -> int | None:
    """EXIF orientation of a TIFF block, 1 (also for undefined values) to 8; 0 if there is none; None if only Pillow can
    tell, because the block is damaged or the value has another type."""
    reading = _BLOCKS.get(tiff[:4])
    if reading is None or len(tiff) < 8:
        return None
    long, short, entry, shift = reading
    start, size = long(tiff, 4)[0] + 2, len(tiff)
    if start > size:
        return None
    end = start + _ENTRY * min(short(tiff, start - 2)[0], (size - start) // _ENTRY)
    for at in range(start, end, _ENTRY):
        tag, kind, count, value = entry(tiff, at)
        if tag == _ORIENTATION:
            # With a second entry for it, Pillow decides which one counts.
            others = range(at + _ENTRY, end, _ENTRY) if tiff.find(tiff[at : at + 2], at + _ENTRY, end) >= 0 else ()
            if kind != _SHORT or count != 1 or any(entry(tiff, k)[0] == _ORIENTATION for k in others):
                return None
            value = value >> shift & 0xFFFF
            return value if 1 <= value <= 8 else 1
        length = count * _TYPES.get(kind, 0)
        if length > 4 and value + length > size:  # Pillow reads nothing behind it
            return None
    return 0


def say_orientations(orientations: Iterable[int]) -> str:
    """The orientations of images, with counts: "12 a quarter turn clockwise; 3 upside down"."""
    counts = Counter(ORIENTATIONS[value] for value in orientations if value in ORIENTATIONS)
    return "; ".join(f"{count:,} {text}" for text, count in counts.most_common())


_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by colour type
_DEPTH_AND_COLOR = frozenset(depth << 8 | color for color, depths in _DEPTHS.items() for depth in depths)
_MAX_CHUNKS = 256
_MAX_PIXEL_CHUNKS = 1 << 14
_MAX_EXIF = 1 << 16
_PNG = int(ImageFormat.PNG)
_PNG_BEGIN = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
# Signature and IHDR: beginning, width, height, depth and colour, filter, checksum; length and name of the next chunk.
_png_header = struct.Struct(">16sIIHxBxII4s").unpack_from
_PNG_HEADER_BYTES = 41
_png_chunk = struct.Struct(">I4s").unpack_from


def read_png(head: bytes, source: Opened) -> HeaderRow | None:
    """(width, height, orientation, format), or None if only a full decoder can tell.

    As decoders demand, the header's checksum must be right and the pixels (IDAT) must begin inside the file.
    """
    if len(head) < _PNG_HEADER_BYTES:
        return None
    begin, width, height, depth_and_color, filtering, checksum, length, next_chunk = _png_header(head)
    if begin != _PNG_BEGIN or depth_and_color not in _DEPTH_AND_COLOR or filtering or crc32(head[12:29]) != checksum:
        return None
    if width > MAX_SIDE or height > MAX_SIDE:
        return None
    if next_chunk == b"IDAT":
        return (width, height, 1, _PNG) if _ends_in_pixels(head, source, 33, length) else None
    orientation = _png_orientation(head, source)
    return None if orientation is None else (width, height, orientation or 1, _PNG)


# Chunks that may hold an orientation, or more text than Pillow reads; and the beginnings of texts that hold one.
_METADATA = frozenset((b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"iCCP"))
_WITH_ORIENTATION = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0", b"exif\0", b"xmp\0")
_MOST_TEXT = 1 << 20  # bytes, unpacked: Pillow's limit for one text, and 64 times as much for all
_SMALL_TEXT = 1000  # bytes, packed, which never unpack to that much


def _png_orientation(head: bytes, source: Opened) -> int | None:
    """The orientation in the chunks before IDAT, 0 for none. None if IDAT is not reached, or only Pillow can tell."""
    orientation, at, texts = -1, 33, 0
    for _ in range(_MAX_CHUNKS):
        chunk = head[at : at + 8] if at + 8 <= len(head) else read_at(source, at, 8)
        if len(chunk) < 8:
            return None
        length, name = _png_chunk(chunk)
        if name == b"IDAT":
            return max(orientation, 0) if _ends_in_pixels(head, source, at, length) else None
        if name == b"eXIf":
            value = exif_orientation(_part(head, source, at + 8, min(length, _MAX_EXIF)))
            if orientation >= 0 or not value:
                return None
            orientation = value
        elif name in _METADATA and (name != b"iCCP" or length > _SMALL_TEXT):
            # Of packed texts, as much as they may unpack to.
            texts += length if name == b"tEXt" else max(length, _MOST_TEXT)
            if texts > 64 * _MOST_TEXT or not _is_plain(name, head, source, at + 8, length):
                return None
        at += 12 + length
    return None


def _part(head: bytes, source: Opened, at: int, length: int) -> bytes:
    return head[at : at + length] if at + length <= len(head) else read_at(source, at, length)


def _is_plain(name: bytes, head: bytes, source: Opened, at: int, length: int) -> bool:
    """Whether a text or profile holds no orientation, and no more than Pillow reads."""
    if _part(head, source, at, min(length, 32)).startswith(_WITH_ORIENTATION):
        return False
    if name == b"tEXt" or length <= _SMALL_TEXT:
        return True
    if name == b"iTXt" or length > _MOST_TEXT:
        return False
    data = _part(head, source, at, length)
    unpacker = decompressobj()
    try:
        unpacker.decompress(data[data.find(0) + 2 :], _MOST_TEXT)
    except error:
        return False
    return not unpacker.unconsumed_tail


def _ends_in_pixels(head: bytes, source: Opened, at: int, length: int) -> bool:
    """Whether no chunk behind the first IDAT, at `at`, could hold an orientation.

    Files at an address are not read further for this: each look would be a request.
    """
    step, size = 12 + length, len(head)
    if size == HEAD_BYTES:
        if isinstance(source, RemoteFile):
            return True
        size = os.lseek(source, 0, os.SEEK_END) if isinstance(source, int) else length_of(source)
    if at + step + 12 == size:  # only IEND follows
        return True
    # Usually all IDAT but the last have the same length: then the last one is where this division leads.
    last = at + max(0, size - 13 - at) // step * step
    chunk = read_at(source, last, 8)
    if len(chunk) == 8:
        length, name = _png_chunk(chunk)
        if name == b"IDAT" and last + 24 + length == size:
            return True
    # Else go through all chunks.
    for _ in range(_MAX_PIXEL_CHUNKS):
        at += step
        chunk = _part(head, source, at, 8)
        if len(chunk) < 8:
            return True
        length, name = _png_chunk(chunk)
        if name in _METADATA:
            return False
        step = 12 + length
    return True


_FRAME = frozenset((0xC0, 0xC1, 0xC2))
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
_SCAN = 0xDA
_APP1 = 0xE1
_EXIF_MARK = b"Exif\0\0"  # precedes the block, which some programs keep in WebP
_XMP_ORIENTATION, _XMP_BEGIN = b"tiff:Orientation", b"http:/"
_MAX_SEGMENTS = 1024
_REFILL = 4096
_JPEG = int(ImageFormat.JPEG)
_segment = struct.Struct(">BBH").unpack_from


def read_jpeg(head: bytes, source: Opened) -> HeaderRow | None:
    """(width, height, orientation, format), or None if only a full decoder can tell.

    As in a decoder, segments are followed up to the first scan; profiles and previews are skipped without being read.
    Two frame headers, 12-bit samples, arithmetic coding, padding, EXIF in several segments, an orientation in XMP alone
    and anything else unusual are left to the decoder.
    """
    if not head.startswith(b"\xff\xd8\xff"):
        return None
    width, height, orientation = -1, -1, -1
    base, at, end = 0, 2, len(head)
    xmp: tuple[tuple[int, int], ...] = ()
    for _ in range(_MAX_SEGMENTS):
        # `head` holds the bytes of the file from `base` on; read more where the next segment begins behind it.
        if at + 10 > end:
            base += at
            head = read_at(source, base, _REFILL)
            at, end = 0, len(head)
            if end < 10:
                return None
        ff, marker, length = _segment(head, at)
        if ff != 0xFF or length < 2:
            return None
        # Segments that no pixel depends on, among them EXIF and XMP; the frame header; the scan, where the header ends.
        if marker in _SKIPPED:
            if marker == _APP1 and head.startswith(_EXIF_MARK, at + 4):
                block = head[at + 10 : at + 2 + length]
                is_cut = len(block) < length - 8
                value = exif_orientation(read_at(source, base + at + 10, length - 8) if is_cut else block)
                if value is None or orientation >= 0:  # several segments form one block
                    return None
                orientation = value
            elif marker == _APP1 and head.startswith(_XMP_BEGIN, at + 4):
                xmp += ((base + at + 4, length - 2),)
        elif marker in _FRAME:
            if width >= 0 or head[at + 4] != 8 or head[at + 9] not in (1, 3, 4):
                return None
            width, height = head[at + 7] << 8 | head[at + 8], head[at + 5] << 8 | head[at + 6]
        elif marker == _SCAN and width >= 0 and at + 2 + length <= end:
            # An orientation in XMP counts where EXIF states none.
            if xmp and orientation < 1 and any(_XMP_ORIENTATION in read_at(source, *part) for part in xmp):
                return None
            return width, height, orientation if orientation > 1 else 1, _JPEG
        else:
            return None
        at += 2 + length
    return None


_HAS_EXIF, _HAS_XMP = 0x08, 0x04
_CANVAS_BYTES = 10
_FIRST_CHUNK = 30
_WEBP_CHUNKS = 64
# A chunk's name and length, and most EXIF blocks whole.
_LOOK = 2048
_webp_header = struct.Struct("<4sI4s4sIB").unpack_from
_webp_chunk = struct.Struct("<4sI").unpack_from
_int = int.from_bytes
_WEBP = int(ImageFormat.WEBP)


def read_webp(head: bytes, source: Opened) -> HeaderRow | None:
    """(width, height, orientation, format), or None if only a full decoder can tell, as for a truncated file.

    An extended file stores each side of the canvas minus one in 24 bits; imagesize 1.4.1 forgets to add one.
    """
    reached = len(head)
    if reached < 30:
        return None
    riff, end, webp, kind, length, first = _webp_header(head)  # first: of the chunk's bytes
    if riff != b"RIFF" or webp != b"WEBP":
        return None
    end += 8
    orientation = 1
    if kind == b"VP8X":
        if length != _CANVAS_BYTES:
            return None
        if first & (_HAS_EXIF | _HAS_XMP):
            reached, value = _webp_orientation(head, source, first)
            if value is None:
                return None
            orientation = value
    if reached < end and (reached < HEAD_BYTES or length_of(source) < end):
        return None
    if kind == b"VP8X":
        return _int(head[24:27], "little") + 1, _int(head[27:30], "little") + 1, orientation, _WEBP
    if kind == b"VP8 ":
        shown_key_frame = first & 0x11 == 0x10
        if not shown_key_frame or head[23:26] != b"\x9d\x01\x2a":
            return None
        return _int(head[26:28], "little") & 0x3FFF, _int(head[28:30], "little") & 0x3FFF, 1, _WEBP
    if kind == b"VP8L":
        bits = _int(head[21:25], "little")
        if first != 0x2F or bits >> 29:
            return None
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1, _WEBP
    return None


def _webp_orientation(head: bytes, source: Opened, flags: int) -> tuple[int, int | None]:
    """(bytes that the file is known to have, orientation); None if only Pillow can tell."""
    # `head` holds the bytes of the file from `start` to `reached`; a chunk begins `at`.
    at, start, reached = _FIRST_CHUNK, 0, len(head)
    for _ in range(_WEBP_CHUNKS):
        if at + 8 > reached:
            if reached < HEAD_BYTES:
                break
            head, start = read_at(source, at, _LOOK), at
            reached = at + len(head)
            if at + 8 > reached:
                break
        name, length = _webp_chunk(head, at - start)
        at += 8
        if (name == b"EXIF" and flags & _HAS_EXIF) or (name == b"XMP " and flags & _HAS_XMP):
            if name == b"XMP " and flags & _HAS_EXIF:
                return reached, None  # EXIF takes precedence, and may follow
            if at + length > reached:
                head, start = read_at(source, at, min(length, _MAX_EXIF)), at
            if name == b"XMP ":
                return reached, None if head.find(_XMP_ORIENTATION, at - start, at - start + length) >= 0 else 1
            if head.startswith(_EXIF_MARK, at - start):
                at, length = at + len(_EXIF_MARK), length - len(_EXIF_MARK)
            value = exif_orientation(head[at - start : at - start + length])
            if value is None or (value == 0 and flags & _HAS_XMP):
                return reached, None
            return reached, max(value, 1)
        at += length + (length & 1)
    return reached, 1


# By the first byte; each reader checks the rest of the signature.
_readers: list[Callable[[bytes, Opened], HeaderRow | None]] = [lambda _, __: None] * 256
_readers[0x89], _readers[0xFF], _readers[ord("R")] = read_png, read_jpeg, read_webp


def read_header(path: str) -> HeaderRow:
    """(width, height, EXIF orientation 1 to 8, `ImageFormat`) of an image file.

    Raises:
        UnreadableImageError: the size cannot be read; the text says why.
    """
    try:
        fd = os.open(path, READING)
    except (OSError, ValueError) as error:
        # Checked only now, so that it costs ordinary paths nothing.
        if is_url(path):
            return _remote_header(path)
        if isinstance(error, ValueError):
            raise UnreadableImageError(f"not a usable path ({error})") from None
        # Windows says "permission denied" for folders.
        why = "a folder, not a file" if os.path.isdir(path) else explain_os_error(error)
        raise UnreadableImageError(why) from error
    try:
        head = os.read(fd, HEAD_BYTES)
        if head and (row := _readers[head[0]](head, fd)) and row[0] and row[1]:
            return row
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnreadableImageError("not a regular file")
        if not head:
            raise UnreadableImageError("an empty file (0 bytes)")
        return _by_pillow(fd, head)
    except OSError as error:
        raise UnreadableImageError(explain_os_error(error)) from error
    finally:
        os.close(fd)


def header_of(source: bytes | Pieces) -> HeaderRow:
    """`read_header` for a file in memory, or in pieces.

    Raises:
        UnreadableImageError: the size cannot be read; the text says why.
        OSError: the open file cannot be read.
    """
    if not length_of(source):
        raise UnreadableImageError("an empty file (0 bytes)")
    head = read_at(source, 0, HEAD_BYTES)
    row = _readers[head[0]](head, source)
    if not (row and row[0] and row[1]):
        return _by_pillow(source, head)
    from kohya_bucket.images.by_pillow import refuse_large

    refuse_large(*row[:2])
    return row


def _by_pillow(source: Opened, head: bytes) -> HeaderRow:
    # Imported late: most folders do not need it, and helper processes of a scan should start quickly.
    from kohya_bucket.images.by_pillow import open_with_pillow

    with HeaderFile(source) as file:
        return open_with_pillow(file, sniff(head[:32]))


def _remote_header(url: str) -> HeaderRow:
    try:
        return header_of(RemoteFile(url))
    except OSError as error:
        raise UnreadableImageError(explain_os_error(error)) from None
