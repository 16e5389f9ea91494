"""The header readers find the turn that `PIL.ImageOps.exif_transpose` applies, wherever a file has it."""

import io
import random
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.headers import header_of
from kohya_bucket.images.pixels import load_pixels
from tests.thinned import one_in

SIZE = 40, 24


def pixels() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (SIZE[1], SIZE[0], 3), dtype=np.uint8))


def saved(kind: str, **options) -> bytes:
    file = io.BytesIO()
    pixels().save(file, kind, **options)
    return file.getvalue()


def tiff(rng: random.Random, value: int | None = None) -> bytes:
    """An EXIF block of either byte order, with the orientation at a random place among other entries, or without."""
    order, value = rng.choice("<>"), rng.randrange(10) if value is None else value
    kind, count = rng.choices([(3, 1), (4, 1), (1, 1), (3, 2), (8, 1), (5, 1), (99, 1)], [12, 1, 1, 1, 1, 1, 1])[0]
    entries = [struct.pack(order + "HHIHH", 0x0112, kind, count, value, 0)] * rng.choices([0, 1, 2], [3, 9, 1])[0]
    for tag in rng.sample([0x00FE, 0x010E, 0x010F, 0x0110, 0x0131, 0x8298], rng.randrange(4)):
        length = rng.choice([1, 4, 10, 30])
        entries.insert(rng.randrange(len(entries) + 1), struct.pack(order + "HHII", tag, 2, length, rng.randrange(300)))
    if rng.random() < 0.7:
        entries.sort(key=lambda entry: struct.unpack_from(order + "H", entry))
    body = struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4)
    block = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8) + body
    block += bytes(rng.choice([0, 50, 400]))
    return block[: rng.randrange(len(block))] if rng.random() < 0.05 else block


def xmp(rng: random.Random) -> bytes:
    value = rng.randrange(10)
    said = [
        f'<rdf:Description tiff:Orientation="{value}"/>', f"<tiff:Orientation>{value}</tiff:Orientation>",
        "<rdf:Description/>", f"<x tiff:Orientation='{value}'/>",
    ]  # fmt: skip
    return f"<x:xmpmeta>{rng.choice(said)}</x:xmpmeta>{' ' * rng.choice([0, 3000])}".encode()


def raw_profile(rng: random.Random) -> bytes:
    """As ImageMagick writes EXIF into a PNG's text."""
    data = b"Exif\0\0" + tiff(rng)
    lines = [data.hex()[i : i + 72] for i in range(0, 2 * len(data), 72)]
    return f"\nexif\n{len(data):8}\n{chr(10).join(lines)}\n".encode()


def a_jpeg(rng: random.Random) -> bytes:
    data = saved("JPEG", progressive=rng.random() < 0.5)
    segments = []
    for _ in range(rng.randrange(4)):
        name = rng.choice(["exif", "exif", "split", "xmp", "extended", "other"])
        if name == "split":
            block = tiff(rng)
            at = rng.randrange(len(block) + 1)
            segments += [(0xE1, b"Exif\0\0" + block[:at]), (0xE1, b"Exif\0\0" + block[at:])]
        else:
            segments.append(
                {
                    "exif": (0xE1, b"Exif\0\0" * rng.choice([1, 1, 1, 2]) + tiff(rng)),
                    "xmp": (0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp(rng)),
                    "extended": (0xE1, b"http://ns.adobe.com/xmp/extension/\0" + xmp(rng)),
                    "other": (rng.choice([0xE2, 0xEC, 0xFE]), rng.randbytes(rng.choice([5, 6000]))),
                }[name]
            )
    packed = b"".join(struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body for marker, body in segments)
    return data[:2] + packed + data[2:]


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def a_png(rng: random.Random) -> bytes:
    def telling() -> bytes:
        name = rng.choice(["exif", "exif", "raw", "zraw", "xmp", "zxmp", "text", "large", "profile", "lower"])
        key = b"Raw profile type exif\0"
        return {
            "exif": lambda: chunk(b"eXIf", tiff(rng)),
            "raw": lambda: chunk(b"tEXt", key + raw_profile(rng)),
            "zraw": lambda: chunk(b"zTXt", key + b"\0" + zlib.compress(raw_profile(rng))),
            "xmp": lambda: chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(rng)),
            "zxmp": lambda: chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(rng))),
            "text": lambda: chunk(b"tEXt", b"parameters\0" + rng.randbytes(rng.choice([20, 9000]))),
            "large": lambda: chunk(b"zTXt", b"much\0\0" + zlib.compress(bytes(rng.choice([1 << 18, 1 << 21])))),
            "profile": lambda: chunk(b"iCCP", b"sRGB\0\0" + zlib.compress(rng.randbytes(3000))),
            "lower": lambda: chunk(b"tEXt", b"xmp\0" + xmp(rng)),
        }[name]()

    plain = saved("PNG")
    header, data = plain[:33], plain[33:-12]
    body = data[8:-4]
    cut = rng.choice([100, 500, len(body), len(body)])
    if rng.random() < 0.2:
        at = rng.randrange(len(body))
        parts = [body[:at], body[at:]]
    else:
        parts = [body[i : i + cut] for i in range(0, len(body), cut)]
    before = b"".join(telling() for _ in range(rng.choice([0, 0, 1, 2])))
    after = b"".join(telling() for _ in range(rng.choice([0, 0, 1, 2])))
    return header + before + b"".join(chunk(b"IDAT", part) for part in parts) + after + plain[-12:]


def a_webp(rng: random.Random) -> bytes:
    lossless = rng.random() < 0.5
    inner = saved("WEBP", lossless=lossless)[12:]
    parts = [(b"EXIF", b"Exif\0\0" * rng.choice([0, 0, 1, 2]) + tiff(rng)) for _ in range(rng.choice([0, 1, 1, 2]))]
    parts += [(b"XMP ", xmp(rng)) for _ in range(rng.choice([0, 0, 1]))]
    rng.shuffle(parts)
    names = [name for name, _ in parts]
    flags = 8 * (b"EXIF" in names) | 4 * (b"XMP " in names)
    body = b"VP8X" + struct.pack("<IB", 10, flags) + bytes(3) + b"".join((s - 1).to_bytes(3, "little") for s in SIZE)
    body += inner
    for name, data in parts:
        body += name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def by_pillow(kind: str):
    def make(rng: random.Random) -> bytes:
        exif = Image.Exif()
        if rng.random() < 0.8:
            exif[0x0112] = rng.randrange(1, 9)
        options = {"exif": exif.tobytes()}
        if rng.random() < 0.5:
            options["xmp"] = xmp(rng)
        return saved(kind, **options)

    return make


MAKERS = {"JPEG": a_jpeg, "PNG": a_png, "WEBP": a_webp, "MPO": by_pillow("MPO"), "TIFF": by_pillow("TIFF")}
if features.check("avif"):
    MAKERS["AVIF"] = by_pillow("AVIF")


def pillows(data: bytes) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """(size as it is opened, size upright, orientation) by Pillow alone; None where it refuses the file.

    An EXIF block that Pillow itself ends at asks for nothing. (`exif_transpose` also writes the block again, which
    fails for some that it has read.)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data))
            size = image.size
            image.load()
        except Exception:
            return None
        try:
            orientation = image.getexif().get(0x0112, 1)
            orientation = int(orientation) if orientation in range(1, 9) else 1
        except Exception:
            return size, size, 1
        try:
            return size, ImageOps.exif_transpose(image).size, orientation
        except Exception:
            return size, size[::-1] if orientation >= 5 else size, orientation


@pytest.mark.long
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("in_memory", one_in(2, [False, True]), ids=["file", "bytes"])
def test_the_turn_is_pillows_wherever_it_stands(tmp_path, kind, in_memory) -> None:
    turned = refused = 0
    for seed in range(300 if kind in ("JPEG", "PNG", "WEBP") else 30):
        rng = random.Random(f"{kind} {seed}")
        data = MAKERS[kind](rng)
        wanted = pillows(data)
        if in_memory:
            source = data
        else:
            (tmp_path / "image").write_bytes(data)
            source = (tmp_path / "image").open("rb")
        try:
            width, height, orientation, _ = header_of(source)
        except UnreadableImageError:
            assert wanted is None, seed
            refused += 1
            continue
        finally:
            if not in_memory:
                source.close()
        assert wanted is not None, seed
        upright = (height, width) if orientation >= 5 else (width, height)
        assert ((width, height), upright, orientation) == wanted, seed
        turned += orientation > 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert load_pixels(data, obey_exif=True).shape[1::-1] == upright, seed
    assert turned > 5 or kind == "TIFF"  # which Pillow turns when it opens it
    assert bool(refused) == (kind == "PNG")  # whose text may be larger than Pillow reads
