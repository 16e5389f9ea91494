"""JPEG: the same pixels whoever decodes them."""

import io
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kohya_bucket.images import pixels
from kohya_bucket.images.pixels import NO_IMAGE, load_pixels

pytestmark = pytest.mark.further


@pytest.fixture
def simplejpeg(monkeypatch):
    module = pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    monkeypatch.setattr(pixels, "_simplejpeg", lambda: module)
    return module


def by_pillow(data, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "_simplejpeg", lambda: None)
        return load_pixels(data, **options)


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


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_simplejpeg_gives_pillows_pixels(simplejpeg, mode, progressive, subsampling):
    for quality, size in ((35, (131, 83)), (90, (160, 99)), (100, (128, 80))):
        data = encoded(size, mode, quality=quality, progressive=progressive, subsampling=subsampling)
        for alpha in (False, True):
            assert np.array_equal(load_pixels(data, alpha=alpha), by_pillow(data, alpha=alpha))


def test_simplejpeg_is_what_decodes(simplejpeg, monkeypatch):
    called = []
    spy = types.SimpleNamespace(decode_jpeg=lambda *a, **k: called.append(k) or simplejpeg.decode_jpeg(*a, **k))
    monkeypatch.setattr(pixels, "_simplejpeg", lambda: spy)
    load_pixels(encoded((64, 48)))
    load_pixels(encoded((64, 48), format="MPO"))
    load_pixels(encoded((64, 48), orientation=6), obey_exif=True)  # is turned by Pillow
    assert called == [{}, {}]


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
                load_pixels(data)
        else:
            assert np.array_equal(load_pixels(data), want)


def test_a_decoder_with_other_bits_is_not_used(simplejpeg):
    assert pixels._is_pillows(simplejpeg)
    fast = types.SimpleNamespace(decode_jpeg=lambda *a, **k: simplejpeg.decode_jpeg(*a, fastupsample=True, **k))
    assert not pixels._is_pillows(fast)
