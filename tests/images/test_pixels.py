"""Pixels are what sd-scripts would train, whatever library resizes them."""

from __future__ import annotations

import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import resize as pixels
from kohya_bucket.images.area_resize import shrink_by_area
from kohya_bucket.images.pixels import load_pixels

pytestmark = pytest.mark.further

sides = st.integers(8, 90)


@pytest.fixture
def without_cv2(monkeypatch):
    monkeypatch.setattr(pixels, "_cv2", lambda: None)


def image(width, height, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


@given(sides, sides, sides, sides, st.sampled_from(pixels.INTERPOLATIONS), st.sampled_from([3, 4]))
def test_result_has_the_bucket_size(width, height, resized_width, resized_height, name, channels):
    bucket = (resized_width // 8 * 8, resized_height // 8 * 8)
    out = pixels.resize_and_crop(image(width, height, channels), (resized_width, resized_height), bucket, name)
    assert out.shape == (bucket[1], bucket[0], channels)
    assert out.dtype == np.uint8
    assert out.flags.c_contiguous


@given(sides, sides)
def test_without_resize_the_crop_is_the_centre(width, height):
    source = image(width, height)
    bucket = (width // 8 * 8, height // 8 * 8)
    out = pixels.resize_and_crop(source, (width, height), bucket)
    left, top = (width - bucket[0]) // 2, (height - bucket[1]) // 2
    assert np.array_equal(out, source[top : top + bucket[1], left : left + bucket[0]])


def test_area_of_whole_factors_is_the_mean(without_cv2):
    source = image(64, 48)
    out = pixels.resize_and_crop(source, (16, 16), (16, 16), "area")
    mean = source.reshape(16, 3, 16, 4, 3).mean(axis=(1, 3))
    assert np.abs(out - mean).max() <= 0.5 + 1e-9


@given(sides, sides, st.integers(1, 90), st.integers(1, 90), st.sampled_from([3, 4]))
def test_area_without_opencv_is_opencvs_bit_for_bit(width, height, to_width, to_height, channels):
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    to_width, to_height = min(width, to_width), min(height, to_height)
    source = image(width, height, channels)
    mine = shrink_by_area(source, (to_width, to_height))
    assert np.array_equal(mine, cv2.resize(source, (to_width, to_height), interpolation=cv2.INTER_AREA))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 14), st.integers(1, 14), st.sampled_from([3, 4]))
@example(8, 6, 1, 14, 3)
def test_area_by_whole_factors_is_opencvs_too(to_width, to_height, across, down, channels):
    """Exact halves come often there."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    source = image(to_width * across, to_height * down, channels)
    mine = shrink_by_area(source, (to_width, to_height))
    assert np.array_equal(mine, cv2.resize(source, (to_width, to_height), interpolation=cv2.INTER_AREA))


@pytest.mark.parametrize(
    ("size", "to"), [((1280, 1024), (1024, 819)), ((4000, 3001), (513, 384)), ((999, 70), (999, 69))]
)
def test_area_of_large_images_is_opencvs_too(size, to):
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    source = image(*size)
    assert np.array_equal(shrink_by_area(source, to), cv2.resize(source, to, interpolation=cv2.INTER_AREA))


@given(st.integers(3, 16), st.integers(3, 16), st.sampled_from([(3, 2), (5, 4), (4, 3), (7, 4)]), st.integers(0, 9))
def test_sums_near_a_half_are_opencvs_too(width, height, factor, seed):
    """Neighbouring values and simple shares: there a sum in another order rounds to the other side."""
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    before, after = factor
    values = np.random.default_rng(seed).integers(0, 2, (height * before, width * before, 3), dtype=np.uint8)
    to = (width * after, height * after)
    for source in (values, values + np.uint8(127), values * np.uint8(255)):
        assert np.array_equal(shrink_by_area(source, to), cv2.resize(source, to, interpolation=cv2.INTER_AREA))


def test_where_each_sum_is_a_half_memory_stays_small():
    source = np.indices((300, 1000)).sum(axis=0) % 2
    source = np.repeat(source[..., None], 3, axis=2).astype(np.uint8)
    tracemalloc.start()
    try:
        shrink_by_area(source, (400, 30))
        assert tracemalloc.get_traced_memory()[1] < 40e6
    finally:
        tracemalloc.stop()


@given(sides, sides, sides, sides, st.floats(0.01, 1), st.floats(0.01, 1))
@example(300, 2000, 120, 700, 1.0, 0.5)
def test_area_is_the_mean_over_what_each_pixel_covers(width, height, to_width, to_height, of_column, of_row):
    """Against a plain computation in float64 that knows nothing of OpenCV; the image ends within the last pixels."""
    extent = (width - 1 + of_column, height - 1 + of_row)
    to_width, to_height = min(int(extent[0]), to_width), min(int(extent[1]), to_height)
    source = image(width, height)

    def shares(lines, before, after):
        edges = np.arange(after + 1) * (before / after)
        low, high = np.arange(lines), np.minimum(np.arange(lines) + 1, before)
        covered = np.minimum(high, edges[1:, None]) - np.maximum(low, edges[:-1, None])
        return np.maximum(covered, 0) * (after / before)

    rows, columns = shares(height, extent[1], to_height), shares(width, extent[0], to_width)
    want = np.einsum("yh,xw,hwc->yxc", rows, columns, source.astype(float), optimize=True)
    # slivers below a thousandth of a pixel are left out, on both axes
    assert np.abs(shrink_by_area(source, (to_width, to_height), extent) - want).max() <= 0.5 + 255 * 4e-3


def test_nearest_is_opencvs_exact_nearest_where_opencv_is():
    cv2 = pytest.importorskip("cv2", reason="OpenCV is not installed")
    source = image(77, 53)
    for size in [(40, 30), (16, 50), (100, 90), (31, 17)]:
        mine = pixels.resize_and_crop(source, size, size, "nearest")
        assert np.array_equal(mine, cv2.resize(source, size, interpolation=cv2.INTER_NEAREST_EXACT))


@pytest.mark.parametrize(
    ("size", "resized", "name", "chosen"),
    [
        ((100, 100), (50, 50), None, "area"),
        ((100, 100), (100, 50), "auto", "area"),
        ((100, 100), (101, 50), "auto", "lanczos"),
        ((100, 100), (50, 50), "cubic", "bicubic"),
    ],
)
def test_choice_of_filter(size, resized, name, chosen):
    assert pixels.choose_interpolation(size, resized, name) == chosen


def test_resampler_is_named(without_cv2):
    assert pixels.resampler("area") == "cv2"
    assert pixels.resampler("area", shrinks=False) == "pillow"
    assert pixels.resampler("lanczos") == "pillow"


def test_what_only_calls_itself_cv2_is_not_used(monkeypatch):
    """sd-scripts registers such a module where OpenCV is missing, and resizes with it itself."""
    pixels._cv2.cache_clear()
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(_IS_CV2_STUB=True))
    try:
        assert pixels._cv2() is None
        made = [[pixels.resampler(name, by_trainer=own) for own in (False, True)] for name in ("area", "lanczos")]
        assert made == [["cv2", "cv2-stub"], ["pillow", "pillow"]]
    finally:
        pixels._cv2.cache_clear()


def test_loading_ignores_orientation_and_keeps_alpha(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(image(30, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert load_pixels(tmp_path / "turned.jpg").shape == (20, 30, 3)
    with_alpha = image(30, 20, 4)
    Image.fromarray(with_alpha).save(tmp_path / "a.png")
    assert np.array_equal(load_pixels(tmp_path / "a.png", alpha=True), with_alpha)
    assert load_pixels(tmp_path / "a.png").shape == (20, 30, 3)


def test_errors_name_the_file_and_the_remedy(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(KohyaBucketError, match=r"broken\.png: cannot be read"):
        load_pixels(tmp_path / "broken.png")
    with pytest.raises(KohyaBucketError, match="does not exist"):
        pixels.resize_and_crop(image(9, 9), (8, 8), (8, 8), "sinc")
    with pytest.raises(KohyaBucketError, match="does not cover"):
        pixels.resize_and_crop(image(9, 9), (8, 8), (16, 8))
    with pytest.raises(KohyaBucketError, match="leaves"):
        pixels.resize_and_crop(image(9, 9), (9, 9), (8, 8), crop=(2, 0))
