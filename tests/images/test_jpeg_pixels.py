"""JPEG: the same pixels whoever decodes them, and at a fraction of their size never fewer than are asked for."""

from __future__ import annotations

import io
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kohya_bucket.images import pixels
from kohya_bucket.images.pixels import NO_IMAGE, load_picture

pytestmark = pytest.mark.further

sides = st.integers(1, 130)


@pytest.fixture
def simplejpeg(monkeypatch):
    module = pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    monkeypatch.setattr(pixels, "_simplejpeg", lambda: module)
    return module


def by_pillow(data, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "_simplejpeg", lambda: None)
        return load_picture(data, **options)


def encoded(size, mode="RGB", *, orientation=1, format="JPEG", seed=0, **options):
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 8 + 2, size[0] // 8 + 2, 4), dtype=np.uint8)
    bands = {"L": 1, "RGB": 3, "CMYK": 4, "RGBA": 4}[mode]
    image = Image.fromarray(noise[..., :bands].squeeze(), mode).resize(size, Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if orientation != 1:
        exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, format, exif=exif, **options)
    return file.getvalue()


@given(sides, sides, sides, sides, st.integers(1, 8), st.sampled_from(["L", "RGB", "CMYK"]), st.booleans())
def test_a_fraction_is_the_smallest_that_is_not_below(width, height, to_width, to_height, orientation, mode, obey):
    data = encoded((width, height), mode, orientation=orientation)
    across = obey and orientation >= 5
    size = (height, width) if across else (width, height)
    to = min(to_width, size[0]), min(to_height, size[1])
    asked = []
    found = load_picture(data, obey_exif=obey, fit=lambda whole: asked.append(whole) or to)
    assert found.size == size
    assert asked == [size]
    assert found.pixels.shape[1::-1] == tuple(-(-side // found.scale) for side in size)
    assert found.pixels.shape[1] >= to[0]
    assert found.pixels.shape[0] >= to[1]
    most = min(size[0] // to[0], size[1] // to[1])
    turned = obey and orientation != 1
    fits = [n for n in (1, 2, 4, 8) if n <= most and not (turned and (width % n or height % n))]
    assert found.scale == (1 if min(size) < 16 else fits[-1])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_fraction_is_turned_as_the_whole_is(orientation):
    data = encoded((160, 96), orientation=orientation, quality=95)
    whole = load_picture(data, obey_exif=True)
    half = load_picture(data, obey_exif=True, fit=lambda size: (size[0] // 2, size[1] // 2))
    assert (whole.scale, half.scale, half.size) == (1, 2, whole.size)
    height, width, _ = half.pixels.shape
    means = whole.pixels.reshape(height, 2, width, 2, 3).mean(axis=(1, 3))
    assert np.abs(half.pixels - means).mean() < 3  # turned otherwise it is 40 and more


@pytest.mark.parametrize("ending", ["PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_what_is_no_jpeg_is_decoded_whole(ending):
    data = encoded((160, 96), format=ending)
    found = load_picture(data, fit=lambda _: (10, 10))
    assert (found.scale, found.size) == (1, (160, 96))
    assert np.array_equal(found.pixels, load_picture(data).pixels)


@pytest.mark.parametrize("fit", [None, (64, 40), (32, 20), (16, 10)])
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_simplejpeg_gives_pillows_pixels(simplejpeg, fit, mode, progressive, subsampling):
    for quality, size in ((35, (131, 83)), (90, (160, 99)), (100, (128, 80))):
        data = encoded(size, mode, quality=quality, progressive=progressive, subsampling=subsampling)
        asked = None if fit is None else lambda _: fit
        for alpha in (False, True):
            found, want = (load(data, fit=asked, alpha=alpha) for load in (load_picture, by_pillow))
            assert found[1:] == want[1:]
            assert np.array_equal(found.pixels, want.pixels)


def test_simplejpeg_is_what_decodes(simplejpeg, monkeypatch):
    called = []
    spy = types.SimpleNamespace(decode_jpeg=lambda *a, **k: called.append(k) or simplejpeg.decode_jpeg(*a, **k))
    monkeypatch.setattr(pixels, "_simplejpeg", lambda: spy)
    load_picture(encoded((64, 48)))
    load_picture(encoded((65, 49)), fit=lambda _: (30, 20))
    load_picture(encoded((64, 48), format="MPO"))
    assert called == [{}, {"min_width": 33, "min_height": 25}, {}]


@given(st.integers(0, 1 << 30), st.integers(0, 255))
def test_damaged_files_are_as_pillow_has_them(where, byte):
    if pixels._simplejpeg() is None:
        pytest.skip("simplejpeg is not installed")
    whole = encoded((96, 64), quality=80)
    at = where % len(whole)
    for data in (whole[:at], whole[:at] + bytes([byte]) + whole[at + 1 :], whole + b"trailing"):
        try:
            want = by_pillow(data)
        except NO_IMAGE as error:
            with pytest.raises(type(error)):
                load_picture(data)
        else:
            assert np.array_equal(load_picture(data).pixels, want.pixels)


def test_a_decoder_with_other_bits_is_not_used(simplejpeg):
    assert pixels._is_pillows(simplejpeg)
    fast = types.SimpleNamespace(decode_jpeg=lambda *a, **k: simplejpeg.decode_jpeg(*a, fastupsample=True, **k))
    assert not pixels._is_pillows(fast)
