"""The better no-upscale, and the bound on what is cropped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import KohyaBuckets
from kohya_bucket.buckets import Reason, geometry
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.no_upscale import Admissible, largest_sizes
from kohya_bucket.errors import BucketSettingsError

sides = st.one_of(st.integers(1, 4096), st.integers(1, 64).map(lambda n: n * 64))
size_lists = st.lists(st.tuples(sides, sides), min_size=1, max_size=30)
bounds = st.one_of(st.none(), st.floats(0, 0.6))


def rules(steps, resolution, bound):
    common = {"reso_steps": steps, "no_upscale": True, "max_crop": bound}
    return (
        KohyaBuckets(resolution, no_upscale_fit="largest", **common),
        KohyaBuckets(resolution, **common),
        KohyaBuckets(resolution, no_upscale=True, reso_steps=steps),
    )


@pytest.mark.parametrize(
    ("image", "kohya", "largest"),
    [
        ((3072, 3000), "960x960", "1024x1024"),
        ((1050, 1080), "960x960", "1024x1024"),
        ((1152, 896), "1152x896", "1152x896"),
        ((3072, 1000), "1792x576", "1792x576"),
    ],
)
def test_worked_cases(image, kohya, largest) -> None:
    better, _, plain = rules(64, 1024, None)
    assert (str(plain.assign(*image)), str(better.assign(*image))) == (kohya, largest)


@given(size_lists, bounds, st.sampled_from([16, 64]), st.sampled_from([512, 1024]))
def test_never_less_area_than_kohya_at_the_same_bound(sizes, bound, steps, resolution) -> None:
    better, bounded, plain = (rule.place(sizes) for rule in rules(steps, resolution, bound))
    area = better.bucket_sizes.prod(axis=1)
    assert (area >= bounded.bucket_sizes.prod(axis=1)).all()
    if bound is None:
        assert (area >= plain.bucket_sizes.prod(axis=1)).all()
        at = plain.placed
        images = np.array(sizes)[at]
        shares = [
            aspect_loss(p.bucket_sizes[at, 0] / p.bucket_sizes[at, 1], images[:, 0] / images[:, 1])
            for p in (better, plain)
        ]
        assert (shares[0] <= shares[1] + 1e-9).all()
    else:
        assert (better.crop_loss[better.placed] <= bound).all()
        assert (bounded.crop_loss[bounded.placed] <= bound).all()
        # Where Kohya's own choice is within the bound, the bounded rule does not touch it.
        kept = plain.placed & (plain.crop_loss <= bound)
        np.testing.assert_array_equal(bounded.resized_sizes[kept], plain.resized_sizes[kept])


@given(size_lists, bounds)
def test_no_image_grows_and_exact_sizes_stay(sizes, bound) -> None:
    array = np.array(sizes)
    placement = rules(64, 1024, bound)[0].place(sizes)
    at = placement.placed
    assert (placement.bucket_sizes <= array).all()
    assert (placement.resized_sizes <= array).all()
    assert (placement.bucket_sizes[at] % 64 == 0).all()
    assert (placement.bucket_sizes[at].prod(axis=1) <= 1024 * 1024).all()
    exact = (array % 64 == 0).all(axis=1) & (array.prod(axis=1) <= 1024 * 1024)
    np.testing.assert_array_equal(placement.resized_sizes[exact], array[exact])
    for i in np.flatnonzero(~at):
        too_small = min(sizes[i]) < 64
        assert placement.reason(i) is (Reason.TOO_SMALL if too_small else Reason.CROP_LIMIT)


def test_an_image_that_kohya_cannot_place() -> None:
    plain, better = KohyaBuckets(512, no_upscale=True), rules(64, 512, None)[0]
    assert plain.place([(8000, 100)]).reason(0) is Reason.TOO_SMALL
    assert str(better.assign(8000, 100)) == "4096x64"


@given(size_lists, st.booleans(), st.sampled_from([0.0, 0.03, 0.2]))
def test_the_search_finds_what_trying_all_sizes_finds(sizes, no_upscale, bound) -> None:
    array = np.array(sizes, np.int32)
    found = largest_sizes(array, Admissible(256 * 256, 32, no_upscale), np.ones(len(sizes)), bound)
    width, height = (side.ravel().astype(np.int32) * 32 for side in np.mgrid[1:65, 1:65])
    within = width * height <= 256 * 256
    width, height = width[within], height[within]
    for (w, h), size in zip(sizes, found.tolist(), strict=True):
        aspect = np.full(len(width), w / h)
        image = np.full_like(width, w), np.full_like(width, h)
        resized = geometry.cover_resize(*image, aspect, width, height, width / height)
        allowed = geometry.crop_loss(width, height, *resized) <= bound
        if no_upscale:
            allowed &= (width <= w) & (height <= h)
        assert size[0] * size[1] == (width * height)[allowed].max(initial=0)


@given(size_lists, st.sampled_from([16, 64]), st.sampled_from([512, (832, 1216)]), st.booleans())
def test_standard_is_the_usual_bucket_where_the_image_fills_it_and_else_its_own_size(
    sizes, steps, resolution, geometric
) -> None:
    usual = KohyaBuckets(resolution, reso_steps=steps, switching="geometric" if geometric else "midpoint")
    rule = usual.changed(no_upscale=True, no_upscale_fit="standard")
    standard, upscaled, reduced = (one.place(sizes) for one in (rule, usual, usual.changed(no_upscale=True)))
    for i, (width, height) in enumerate(sizes):
        bucket, floored = upscaled.bucket_sizes[i].tolist(), [width // steps * steps, height // steps * steps]
        if bucket[0] <= width and bucket[1] <= height:
            wanted = bucket, upscaled.resized_sizes[i].tolist()
        elif 0 < floored[0] * floored[1] <= rule.max_area:
            wanted = floored, [width, height]
        else:
            assert standard.reason(i) is reduced.reason(i)
            wanted = reduced.bucket_sizes[i].tolist(), reduced.resized_sizes[i].tolist()
        assert (standard.bucket_sizes[i].tolist(), standard.resized_sizes[i].tolist()) == wanted


@given(size_lists, st.floats(0, 0.3))
def test_standard_within_a_bound_changes_only_what_breaks_it(sizes, bound) -> None:
    rule = KohyaBuckets(512, no_upscale=True, no_upscale_fit="standard")
    free, bounded = rule.place(sizes), rule.changed(max_crop=bound).place(sizes)
    assert (bounded.crop_loss[bounded.placed] <= bound).all()
    assert (bounded.bucket_sizes <= np.array(sizes)).all()
    kept = free.placed & (free.crop_loss <= bound)
    np.testing.assert_array_equal(bounded.resized_sizes[kept], free.resized_sizes[kept])


def test_standard_checks_the_limits_of_the_usual_buckets() -> None:
    assert KohyaBuckets(512, 4096, no_upscale=True).bucket_set is None
    with pytest.raises(BucketSettingsError, match="min_size 4096 is above max_size"):
        KohyaBuckets(512, 4096, no_upscale=True, no_upscale_fit="standard")


def test_max_crop_with_upscaling_moves_or_names() -> None:
    free, bounded = KohyaBuckets(512), KohyaBuckets(512, max_crop=0.12)
    sizes = [(768, 512), (1147, 1000), (640, 427), (9000, 100)]
    before, after = free.place(sizes), bounded.place(sizes)
    assert after.reason(3) is Reason.CROP_LIMIT
    assert (after.crop_loss[after.placed] <= 0.12).all()
    kept = before.crop_loss <= 0.12
    np.testing.assert_array_equal(before.bucket_index[kept], after.bucket_index[kept])


def test_settings_that_do_nothing_are_refused() -> None:
    with pytest.raises(BucketSettingsError, match="upscaling is on"):
        KohyaBuckets(512, no_upscale_fit="largest")
    with pytest.raises(BucketSettingsError, match="no_upscale_fit is 'best'"):
        KohyaBuckets(512, no_upscale=True, no_upscale_fit="best")
