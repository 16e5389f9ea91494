"""Laws of Kohya's rule; equality with the original program is tested in `compat_tests/`."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import KohyaBuckets
from kohya_bucket.buckets import Reason
from kohya_bucket.errors import BucketSettingsError
from tests.thinned import weekly

sides = st.integers(1, 20_000)
size_lists = st.lists(st.tuples(sides, sides), min_size=1, max_size=40)


@st.composite
def rules(draw: st.DrawFn, no_upscale: bool | None = None) -> KohyaBuckets:
    steps = draw(st.sampled_from([8, 16, 32, 64]))
    low = steps * draw(st.integers(1, 4))
    width, height = (draw(st.integers(low, 1024)) for _ in range(2))
    high = math.ceil(max(width, height) / steps) * steps + steps * draw(st.integers(0, 8))
    mode = draw(st.booleans()) if no_upscale is None else no_upscale
    return KohyaBuckets((width, height), low, high, steps, no_upscale=mode)


def test_the_default_set_at_512() -> None:
    expected = "256x832 256x896 256x960 256x1024 320x704 320x768 384x640 448x576 512x512"
    half = [tuple(map(int, b.split("x"))) for b in expected.split()]
    both = sorted({*half, *((h, w) for w, h in half)})
    assert [b.as_tuple() for b in KohyaBuckets(512).bucket_set] == both
    assert len(both) == 17


@pytest.mark.parametrize(
    ("image", "bucket", "resized"),
    [
        ((576, 768), (448, 576), (448, 597)),
        ((768, 512), (640, 384), (640, 427)),
        ((832, 1280), (384, 640), (416, 640)),
        ((300, 400), (448, 576), (448, 597)),
    ],
)
def test_worked_cases(image, bucket, resized) -> None:
    placement = KohyaBuckets(512).place([image])
    assert tuple(placement.bucket_sizes[0]) == bucket
    assert tuple(placement.resized_sizes[0]) == resized


def test_only_images_above_the_area_are_reduced() -> None:
    rule = KohyaBuckets(512, no_upscale=True)
    assert [rule.assign(520, height).as_tuple() for height in (504, 505)] == [(512, 448), (448, 448)]


def test_an_image_without_a_bucket_has_a_reason() -> None:
    placement = KohyaBuckets(512, no_upscale=True).place([(63, 1000), (0, 0), (64, 1000)])
    assert placement.placed.tolist() == [False, False, True]
    assert [placement.reason(i) for i in range(3)] == [Reason.TOO_SMALL, Reason.UNREADABLE, Reason.PLACED]
    assert np.isnan(placement.crop_loss[:2]).all()
    with pytest.raises(ValueError, match="50x1000"):
        KohyaBuckets(512, no_upscale=True).assign(50, 1000)


@given(rules(no_upscale=False), size_lists)
def test_nearest_is_the_first_smallest_distance(rule, sizes) -> None:
    indices = rule.assign_many_indices(sizes)
    for (width, height), index in zip(sizes, indices, strict=True):
        if (width, height) in [b.as_tuple() for b in rule.bucket_set]:
            assert rule.bucket_set[index].as_tuple() == (width, height)
        else:
            assert index == np.abs(rule.bucket_set.aspects - width / height).argmin()


@given(rules(), size_lists)
def test_every_bucket_is_covered_and_within_its_limits(rule, sizes) -> None:
    placement = rule.place(sizes)
    at = placement.placed
    buckets, resized = placement.bucket_sizes[at], placement.resized_sizes[at]
    assert (resized >= buckets).all()
    assert (buckets % rule.reso_steps == 0).all()
    assert ((placement.crop_loss[at] >= 0) & (placement.crop_loss[at] < 1)).all()
    if rule.no_upscale:
        assert (resized <= np.array(sizes)[at]).all()
        assert (resized - buckets < rule.reso_steps).all()
    else:
        assert at.all()
        assert (buckets.prod(axis=1) <= rule.max_area).all()
        assert (resized == buckets).any(axis=1).all()


def test_many_images_give_the_same_as_few() -> None:
    sizes = np.random.default_rng(0).integers(0, 5000, (200_000, 2))
    for rule in (KohyaBuckets(1024, 256, 2048), KohyaBuckets(1024, no_upscale=True)):
        whole = rule.place(sizes)
        for start in (0, 99_990, 199_990):
            part = rule.place(sizes[start : start + 10])
            np.testing.assert_array_equal(part.bucket_sizes, whole.bucket_sizes[start : start + 10])
            np.testing.assert_array_equal(part.crop_ltrb, whole.crop_ltrb[start : start + 10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((512, 576, 1024, 64), "min_size 576 is above the shorter side of resolution 512x512: set min_size to 512"),
        ((2048, 256, 1024, 64), "max_size 1024 is below the longer side .* set max_size to 2048"),
        ((512, 250, 1024, 64), "min_size is 250, which is not a positive multiple .* use 192"),
        ((512, 256, 1000, 64), "max_size is 1000, .* use 1024"),
        ((512, 1024, 512, 64), "min_size 1024 is above max_size 512"),
        ((512, 256, 1024, 0), "reso_steps is 0"),
        ((32, 256, 1024, 64), "smaller than one bucket step of 64"),
        ((0, 256, 1024, 64), "resolution is 0x0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_say_so(arguments, message) -> None:
    with pytest.raises(BucketSettingsError, match=message):
        KohyaBuckets(*arguments)


@pytest.mark.parametrize("steps", [7, 64, *map(weekly, (1, 8, 32, 100))])
@pytest.mark.parametrize("reso", [(512, 512), (1000, 700), *map(weekly, ((128, 128), (1024, 1024)))])
def test_what_is_looked_up_by_aspect_is_what_is_computed(reso, steps) -> None:
    rng = np.random.default_rng(steps)
    rule = KohyaBuckets(reso, reso_steps=steps, no_upscale=True)
    sizes = np.concatenate(
        [
            rng.integers(-2, 6000, (20_000, 2)),
            np.exp(rng.uniform(0, 13, (20_000, 2))).astype(np.int64),
            # around the aspects at which buckets change
            rng.integers(1, 30, (20_000, 2)) * steps * 3 + rng.integers(-1, 2, (20_000, 2)),
        ]
    )
    looked_up = rule.place(sizes)
    np.testing.assert_array_equal(rule.assign_many_indices(sizes), looked_up.bucket_index)
    for start in range(0, len(sizes), 20_000):  # too few for a table
        part = slice(start, start + 20_000)
        computed = rule.place(sizes[part])
        for name in ("bucket_sizes", "resized_sizes", "crop_ltrb", "aspect_errors", "crop_loss", "reasons"):
            np.testing.assert_array_equal(getattr(looked_up, name)[part], getattr(computed, name))
        np.testing.assert_array_equal(rule.assign_many_indices(sizes[part]), computed.bucket_index)
