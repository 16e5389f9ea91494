"""Pixels are what sd-scripts would train, whatever library resizes them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import resize as pixels
from kohya_bucket.images.origins import Origins
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


@pytest.mark.parametrize("name", [None, "auto", "area"])
def test_the_area_filter_needs_opencv_and_says_what_to_install(without_cv2, name):
    with pytest.raises(KohyaBucketError, match="pip install opencv-python-headless"):
        pixels.require_filter(name)
    with pytest.raises(KohyaBucketError, match="pip install opencv-python-headless"):
        pixels.resize_and_crop(image(9, 9), (8, 8), (8, 8), name)
    assert pixels.resize_and_crop(image(9, 9), (9, 9), (8, 8), name).shape == (8, 8, 3)  # nothing is shrunk


@pytest.mark.parametrize("name", sorted({*pixels.INTERPOLATIONS} - {"auto", "area"}))
@pytest.mark.parametrize("size", [(40, 30), (120, 90)])
def test_other_filters_do_without_opencv_and_take_each_channel_by_itself(without_cv2, name, size):
    source = image(67, 91, 4)
    pixels.require_filter(name)
    out = pixels.resize_and_crop(source, size, size, name)
    assert out.shape == (size[1], size[0], 4)
    if name not in ("lanczos", "box"):
        assert np.array_equal(out[..., :3], pixels.resize_and_crop(source[..., :3], size, size, name))


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
    assert [pixels.resampler(name) for name in ("area", "lanczos", "bilinear")] == ["cv2", "pillow", "pillow"]


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
        Origins.named([tmp_path / "broken.png"]).pixels(0)
    with pytest.raises(KohyaBucketError, match="does not exist"):
        pixels.resize_and_crop(image(9, 9), (8, 8), (8, 8), "sinc")
    with pytest.raises(KohyaBucketError, match="does not cover"):
        pixels.resize_and_crop(image(9, 9), (8, 8), (16, 8))
    with pytest.raises(KohyaBucketError, match="leaves"):
        pixels.resize_and_crop(image(9, 9), (9, 9), (8, 8), crop=(2, 0))
