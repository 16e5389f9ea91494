"""Exact sizes as keys."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kohya_bucket import ExactBuckets
from kohya_bucket.buckets import Reason
from kohya_bucket.buckets.geometry import covering_sizes, crop_loss
from kohya_bucket.buckets.rules.exact import optimal_sizes
from kohya_bucket.errors import BucketSettingsError

sides = st.integers(1, 20_000)
size_lists = st.lists(st.tuples(sides, sides), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("resolution", "image", "bucket"),
    [
        (512, (576, 768), (448, 576)),
        (512, (768, 512), (576, 384)),
        (512, (832, 1280), (384, 640)),
        (512, (1920, 1080), (640, 384)),
        (512, (3000, 1000), (832, 256)),
        (1024, (1920, 1080), (1344, 768)),
        (1024, (640, 480), (1152, 896)),
        (1024, (3000, 1000), (1792, 576)),
    ],
)
def test_worked_numbers(resolution, image, bucket) -> None:
    assert ExactBuckets(resolution).assign(*image).as_tuple() == bucket


def test_a_side_that_rounds_to_nothing_has_no_bucket() -> None:
    assert ExactBuckets(512).place([(100, 8000)]).reason(0) is Reason.TOO_SMALL


@example(9, 16, 128, 64)  # a root of exactly 1.5 goes to 2,
@example(25, 16, 128, 64)  # and one of 2.5 too: to the even number
@given(sides, sides, st.integers(1, 2048), st.sampled_from([1, 8, 32, 64]))
def test_the_size_is_the_rule_in_whole_numbers(width, height, resolution, divisor) -> None:
    area = max(resolution, divisor) ** 2

    def rounded(side: int, other: int) -> int:
        # round(x) of the root x of a fraction, decided by comparing squares of whole numbers.
        square = Fraction(area * side, other * divisor * divisor)
        low = math.isqrt(square.numerator // square.denominator)
        half = Fraction(2 * low + 1, 2) ** 2
        return low + 1 if square > half or (square == half and low % 2) else low

    units = rounded(width, height), rounded(height, width)
    if units[0] * units[1] * divisor**2 > area:
        units = tuple(math.isqrt(area * a // (b * divisor**2)) for a, b in ((width, height), (height, width)))
    expected = (units[0] * divisor, units[1] * divisor) if min(units) else (0, 0)
    assert tuple(optimal_sizes(np.array([(width, height)], np.int32), area, divisor)[0]) == expected


@given(size_lists, st.booleans(), st.sampled_from([(None, None), (256, 1024), (128, None), (None, 768)]))
def test_every_bucket_keeps_its_limits(sizes, no_upscale, limits) -> None:
    rule = ExactBuckets(512, min_side=limits[0], max_side=limits[1], no_upscale=no_upscale)
    placement = rule.place(sizes)
    buckets = placement.bucket_sizes[placement.placed]
    assert (buckets % 64 == 0).all()
    assert (buckets.prod(axis=1) <= rule.max_area).all()
    assert (buckets >= rule.min_side).all()
    assert (buckets <= rule.max_side).all()
    if no_upscale:
        assert (buckets <= np.array(sizes)[placement.placed]).all()


def test_limits_follow_from_the_area() -> None:
    rule = ExactBuckets(512)
    assert (rule.min_side, rule.max_side) == (64, 4096)
    assert ExactBuckets(512, min_side=256).max_side == 1024


def test_sizes_as_they_are() -> None:
    placement = ExactBuckets(512, resize=False, max_side=1024).place([(512, 768), (500, 512), (2048, 64), (0, 1)])
    assert placement.bucket_sizes[0].tolist() == placement.resized_sizes[0].tolist() == [512, 768]
    reasons = [placement.reason(i) for i in range(1, 4)]
    assert reasons == [Reason.NOT_A_MULTIPLE, Reason.SIDE_LIMIT, Reason.UNREADABLE]


few_sizes = st.lists(
    st.sampled_from([(512, 512), (768, 512), (1920, 1080), (1280, 1000), (3000, 1000), (100, 8000), (90, 500)]),
    min_size=1,
    max_size=60,
)


@given(few_sizes, st.integers(1, 8), st.booleans(), st.integers(0, 100))
def test_redistribution_leaves_no_bucket_below_a_batch(sizes, batch_size, no_upscale, seed) -> None:
    rule = ExactBuckets(512, no_upscale=no_upscale, batch_size=batch_size, underfilled="redistribute")
    free, placement = ExactBuckets(512, no_upscale=no_upscale).place(sizes), rule.place(sizes)
    counts = np.bincount(placement.bucket_index[placement.placed])
    assert (counts[counts > 0] >= batch_size).all()
    # An image that had a bucket is placed or counted as lost; one that stays in a full bucket is not moved.
    lost = free.placed & ~placement.placed
    assert (placement.reasons[lost] == Reason.UNDERFILLED).all()
    if not no_upscale:
        assert not lost.any() or lost.sum() == free.placed.sum() < batch_size
    full = np.bincount(free.bucket_index[free.placed], minlength=1) >= batch_size
    stays = free.placed & full[np.maximum(free.bucket_index, 0)]
    np.testing.assert_array_equal(placement.bucket_sizes[stays], free.bucket_sizes[stays])
    order = np.random.default_rng(seed).permutation(len(sizes))
    np.testing.assert_array_equal(rule.place(np.array(sizes)[order]).bucket_sizes, placement.bucket_sizes[order])


@pytest.mark.parametrize("no_upscale", [False, True])
def test_who_is_left_out_for_its_crop_fits_no_size_within_the_sides(no_upscale) -> None:
    rule = ExactBuckets(512, 32, min_side=64, max_side=512, max_crop=0.05, no_upscale=no_upscale)
    sizes = np.exp(np.random.default_rng(0).uniform(4, 8, (300, 2))).astype(np.int32)
    placement = rule.place(sizes)
    assert placement.crop_loss[placement.placed].max() <= 0.05
    steps = np.arange(64, 513, 32)
    all_sizes = np.array([(w, h) for w in steps for h in steps], dtype=np.int32)
    for image in sizes[placement.reasons == Reason.CROP_LIMIT]:
        fitting = all_sizes[(all_sizes <= image).all(axis=1)] if no_upscale else all_sizes
        resized = covering_sizes(np.tile(image, (len(fitting), 1)), fitting)
        assert (crop_loss(*fitting.T, *resized.T) > 0.05).all(), image


def test_redistribution_takes_the_next_size_by_manhattan_distance() -> None:
    sizes = [(576, 384)] * 4 + [(448, 576)] * 4 + [(640, 384)]
    placement = ExactBuckets(512, batch_size=2, underfilled="redistribute").place(sizes)
    assert placement.bucket_sizes[-1].tolist() == [576, 384]
    last = ExactBuckets(512, batch_size=2, underfilled="redistribute").place([*sizes[:-1], (384, 640)])
    assert last.bucket_sizes[-1].tolist() == [448, 576]
    assert (placement.resized_sizes[-1] >= (576, 384)).all()


def test_redistribution_without_upscaling_takes_what_is_as_large_in_a_side_and_nothing_larger() -> None:
    rule = ExactBuckets(512, no_upscale=True, batch_size=2, underfilled="redistribute")
    assert rule.place([(448, 448), (448, 448), (448, 512)]).bucket_sizes[-1].tolist() == [448, 448]
    assert rule.place([(448, 512), (448, 512), (448, 448)]).reason(2) is Reason.UNDERFILLED


def test_dropping_counts_what_it_drops() -> None:
    placement = ExactBuckets(512, batch_size=2, underfilled="drop").place([(512, 512)] * 3 + [(576, 384)])
    assert (placement.reasons == Reason.UNDERFILLED).sum() == 1
    assert placement.placed.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"divisor": 0}, {"divisor": 1024}, {"min_side": 100}, {"min_side": 512, "max_side": 256},
        {"min_side": 576}, {"underfilled": "merge"}, {"batch_size": 0}, {"resize": False, "max_crop": 0.1},
        {"resize": False, "underfilled": "redistribute"}, {"max_crop": 1.5},
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(options) -> None:
    with pytest.raises(BucketSettingsError):
        ExactBuckets(512, **options)


def test_a_limit_that_would_enlarge_an_image_is_named() -> None:
    placement = ExactBuckets(512, min_side=256, no_upscale=True).place([(200, 200), (300, 30), (600, 600)])
    assert [placement.reason(i) for i in range(3)] == [Reason.SIDE_LIMIT, Reason.TOO_SMALL, Reason.PLACED]


def test_buckets_of_less_than_a_batch_are_dropped_all_at_once(monkeypatch):
    sizes = [(8 * k, 512) for k in range(8, 72)] + [(512, 8 * k) for k in (30, 40, 40)]
    calls = []
    flatnonzero = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda values: calls.append(1) or flatnonzero(values))
    placed = ExactBuckets(1024, 8, resize=False, underfilled="drop", batch_size=2).place(sizes)
    assert placed.bucket_sizes[placed.placed].tolist() == [[512, 320], [512, 320]]
    assert len(calls) < 20
