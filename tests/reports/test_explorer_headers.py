"""The explorer's header readers in a real browser: Python's sizes and orientations, or a reason, never another size."""

import base64
import io
import random

import numpy as np
import pytest
from browser import chromium
from PIL import Image, features

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
from explorer_support import asked, open_explorer

from kohya_bucket.images.formats import ImageFormat, UnreadableImageError
from kohya_bucket.images.headers import header_of
from kohya_bucket.reports.explorer_page import render_explorer
from tests.hostile import any_bytes
from tests.images.test_orientation import MAKERS

pytestmark = pytest.mark.slow
AVIF = [".avif"] if features.check("avif") else []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as session:
        page = render_explorer().replace("img-src data:", "img-src file: data:")
        open_explorer(session, tmp_path_factory.mktemp("page"), page)
        yield session


def picture(ending: str, size=(37, 23), **options) -> bytes:
    pixels = np.random.default_rng(size[0]).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image, out = Image.fromarray(pixels), io.BytesIO()
    image.save(out, Image.registered_extensions()[ending], **options)
    return out.getvalue()


def of_python(data: bytes):
    try:
        width, height, orientation, kind = header_of(data)
    except UnreadableImageError:
        return None
    return width, height, orientation, ImageFormat(kind)


def of_browser(browser, files: list[bytes]):
    return asked(
        browser,
        "const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));"
        "return Promise.all(args[0].map(async (text) => readHeader(new File([bytes(text)], 'x'))))",
        [base64.b64encode(data).decode("ascii") for data in files],
    )


def good_files() -> list[bytes]:
    out = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        out += [picture(ending, (40 + orientation, 30), exif=exif) for ending in (".jpg", ".png", ".webp")]
        exif[37500] = bytes(30_000)  # the frame header lies far behind it
        out += [picture(ending, (640, 30 + orientation), exif=exif) for ending in (".jpg", ".png", ".webp")]
    out += [picture(ending) for ending in (".jpg", ".png", ".webp", ".gif", ".bmp", *AVIF)]
    out += [
        picture(".jpg", progressive=True),
        picture(".jpg", icc_profile=bytes(100_000)),
        picture(".webp", lossless=True),
    ]
    for mode, endings in (
        ("L", (".jpg", ".png", ".gif", ".bmp")),
        ("1", (".png", ".bmp")),
        ("RGBA", (".png", ".webp", *AVIF)),
        ("CMYK", (".jpg",)),
        ("P", (".png", ".gif", ".bmp")),
        ("I;16", (".png",)),
    ):
        for ending in endings:
            buffer = io.BytesIO()
            Image.new(mode, (61, 35)).save(buffer, Image.registered_extensions()[ending])
            out.append(buffer.getvalue())
    return out


def test_every_format_and_orientation(browser) -> None:
    files = good_files()
    for found, data in zip(of_browser(browser, files), files, strict=True):
        width, height, orientation, kind = of_python(data)
        assert found == {"width": width, "height": height, "orientation": orientation}, (kind, found)


def test_damaged_files_get_python_s_size_or_a_reason(browser) -> None:
    rng = random.Random(5)
    good = good_files()
    # Most of the damage shall be where headers are.
    files = []
    for data in [*good, *good[-14:] * 3]:
        for _ in range(3 if len(data) > 20_000 else 10):
            at = min(len(data), rng.choice([64, 200, 1200]))
            files.append(any_bytes(data[:at], rng) + data[at:] if rng.random() < 0.8 else any_bytes(data, rng))
    files += [data[:n] for data in good[:6] + good[-14:] for n in (0, 1, 9, 13, 29, 30, 60, len(data) - 1)]
    told = 0
    for found, data in zip(of_browser(browser, files), files, strict=True):
        python = of_python(data)
        if "reason" in found:
            assert found["reason"]
            continue
        told += 1
        # libavif looks at more of a file than its size.
        if python is None:
            assert data[4:8] == b"ftyp", (data[:80], found)
        else:
            assert (found["width"], found["height"]) == python[:2], (data[:80], found)
            assert found["orientation"] == python[2]
    assert told > len(files) / 4


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "TIFF"])
def test_the_turn_is_pythons_wherever_it_stands(browser, kind) -> None:
    count = 300 if kind in ("JPEG", "PNG", "WEBP") else 30
    files = [MAKERS[kind](random.Random(f"{kind} {seed}")) for seed in range(count)]
    turned = 0
    for seed, (found, data) in enumerate(zip(of_browser(browser, files), files, strict=True)):
        python = of_python(data)
        if python is None or "an AVIF whose XMP has an orientation" in found.get("reason", ""):
            assert "reason" in found, seed
        else:
            assert found == dict(zip(("width", "height", "orientation"), python[:3], strict=True)), seed
            turned += found["orientation"] > 1
    assert turned > 5


def test_what_is_not_read_is_named(browser) -> None:
    tiff = io.BytesIO()
    Image.new("RGB", (8, 8)).save(tiff, "TIFF")
    files = [tiff.getvalue(), b"\xff\x0a" + bytes(50), b"\0\0\0\x18ftypheic" + bytes(40), b"no picture at all", b""]
    reasons = [found["reason"] for found in of_browser(browser, files)]
    assert reasons[0].startswith("a TIFF: not read in the browser")
    assert reasons[1].startswith("a JPEG XL")
    assert reasons[2].startswith("a HEIC")
    assert reasons[3:] == ["not an image that is known here", "an empty file (0 bytes)"]


@pytest.mark.parametrize("given", [True, False], ids=["file", "address"])
@pytest.mark.parametrize("ending", [".jpg", ".png", ".webp", *AVIF])
def test_pictures_are_shown_as_they_are_stored(browser, tmp_path, ending, given) -> None:
    """Four colours in four corners stay where the file has them, whatever EXIF asks for."""
    colours = [(220, 30, 30), (30, 200, 30), (40, 40, 220), (220, 220, 40)]
    pixels = np.zeros((60, 80, 3), dtype=np.uint8)
    for i, colour in enumerate(colours):
        pixels[30 * (i // 2) : 30 * (i // 2) + 30, 40 * (i % 2) : 40 * (i % 2) + 40] = colour
    for orientation in range(1, 9):
        exif, path = Image.Exif(), tmp_path / f"{orientation}{ending}"
        exif[274] = orientation
        Image.fromarray(pixels).save(path, exif=exif, quality=95)
        asked(
            browser,
            "const file = new File([Uint8Array.from(atob(args[0]), (c) => c.charCodeAt(0))], 'x');"
            "const whence = args[2] ? { url: args[2] } : { file };"
            "const { node } = storedPicture({ ...whence, path: `x${args[1]}`, ...await readHeader(file) }, 160, 120);"
            "document.getElementById('probe')?.remove();"
            "const box = h('div', {id: 'probe'}, node);"
            "box.style.cssText = 'position:fixed;left:0;top:0;width:160px;height:120px;z-index:9';"
            "document.body.append(box); await node.firstChild.decode(); return true",
            base64.b64encode(path.read_bytes()).decode("ascii"),
            ending,
            None if given else path.as_uri(),
        )
        shot = Image.open(io.BytesIO(browser.find_element("id", "probe").screenshot_as_png)).convert("RGB")
        assert shot.size == (160, 120)
        for i, colour in enumerate(colours):
            found = np.array(shot.getpixel((40 + 80 * (i % 2), 30 + 60 * (i // 2))))
            assert np.abs(found - colour).max() < 60, (ending, orientation, i, found)
