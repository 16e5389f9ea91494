"""Crops that keep a focus: laws over random pictures, buckets and rectangles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import FixedBuckets, KohyaBuckets, load_preset
from kohya_bucket.buckets.focus import NO_FOCUS, cut_rectangles, focus_crops, focus_pixels, focused
from kohya_bucket.buckets.rules.fixed import OneBucket

share = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 1000).map(lambda n: n / 1000), st.floats(0, 1))
interval = st.tuples(share, share).map(sorted)
rectangle = st.tuples(interval, interval).map(lambda both: (both[0][0], both[1][0], both[0][1], both[1][1]))
side = st.integers(1, 60)


@st.composite
def cases(draw):
    """(rectangle in pixels, resized size, bucket size) of one picture that covers its bucket."""
    bucket = draw(side), draw(side)
    resized = bucket[0] + draw(st.integers(0, 30)), bucket[1] + draw(st.integers(0, 30))
    (pixels,) = focus_pixels(np.array([draw(rectangle)]), np.array([resized])).tolist()
    return tuple(pixels), resized, bucket


def kept(rectangle, crop, bucket):
    sides = [max(0, min(rectangle[a + 2], crop[a] + bucket[a]) - max(rectangle[a], crop[a])) for a in (0, 1)]
    return sides[0] * sides[1]


def crop_of(rectangle, resized, bucket):
    return tuple(focus_crops(np.array([rectangle]), np.array([resized]), np.array([bucket]))[0].tolist())


def middle_of(resized, bucket):
    return tuple((r - b) // 2 for r, b in zip(resized, bucket, strict=True))


@given(case=cases())
def test_no_other_crop_keeps_more_and_none_that_keeps_as_much_is_nearer_to_the_middle(case) -> None:
    rectangle, resized, bucket = case
    crop, middle = crop_of(*case), middle_of(resized, bucket)
    most = kept(rectangle, crop, bucket)
    for left in range(resized[0] - bucket[0] + 1):
        for top in range(resized[1] - bucket[1] + 1):
            other = kept(rectangle, (left, top), bucket)
            assert other <= most
            if other == most:
                assert abs(left - middle[0]) >= abs(crop[0] - middle[0])
                assert abs(top - middle[1]) >= abs(crop[1] - middle[1])
    assert all(0 <= crop[a] <= resized[a] - bucket[a] for a in (0, 1))
    assert most >= kept(rectangle, middle, bucket)


@given(case=cases())
def test_a_mirrored_image_has_the_mirrored_crop(case) -> None:
    (left, top, right, bottom), resized, bucket = case
    crop = crop_of(*case)
    other = crop_of((resized[0] - right, top, resized[0] - left, bottom), resized, bucket)
    excess = resized[0] - bucket[0]
    undecided = excess % 2 == 1 and crop[0] == other[0] == excess // 2  # between two pixels: both as without a focus
    assert undecided or other[0] == excess - crop[0]
    assert other[1] == crop[1]


@given(focus=st.lists(rectangle, min_size=1, max_size=5), width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_the_pixels_of_a_mirrored_rectangle_are_the_mirrored_pixels(focus, width, height) -> None:
    sizes = np.array([(width, height)] * len(focus))
    mirrored = [(1 - right, top, 1 - left, bottom) for left, top, right, bottom in focus]
    here, there = focus_pixels(np.array(focus), sizes), focus_pixels(np.array(mirrored), sizes)
    assert np.array_equal(there[:, [0, 2]], width - here[:, [2, 0]])
    assert np.array_equal(there[:, [1, 3]], here[:, [1, 3]])
    assert (here[:, :2] >= 0).all()
    assert (here[:, 2:] <= sizes).all()
    assert (here[:, 2:] > here[:, :2]).all()


def test_shares_of_whole_pixels_are_these_pixels() -> None:
    width = 300
    for left in range(0, width, 7):
        (found,) = focus_pixels(np.array([(left / width, 0, (left + 3) / width, 1)]), np.array([(width, 10)])).tolist()
        assert found == [left, 0, min(left + 3, width), 10]
    assert focus_pixels(np.array([(0.57, 0.0, 0.58, 1.0)]), np.array([(100, 1)])).tolist() == [[57, 0, 58, 1]]


rules = st.sampled_from([KohyaBuckets(512), KohyaBuckets(512, no_upscale=True), FixedBuckets(load_preset("sdxl"))])
size_lists = st.lists(st.tuples(st.integers(64, 4000), st.integers(64, 4000)), min_size=1, max_size=8)


@given(rule=rules, sizes=size_lists, data=st.data())
def test_without_a_focus_a_placement_is_as_before_and_with_one_only_the_crop_is_another(rule, sizes, data) -> None:
    place = rule.place(sizes)
    rows = st.lists(st.one_of(st.just(NO_FOCUS), rectangle), min_size=len(sizes), max_size=len(sizes))
    focus = np.array(data.draw(rows))
    assert focused(place, None) is place
    assert focused(place, np.full((len(sizes), 4), np.nan)) is place
    found = focused(place, focus)
    same = (found.cuts == place.cuts).all(axis=1)
    assert same[np.isnan(focus).any(axis=1)].all()
    assert np.array_equal(found.crop_ltrb[same], place.crop_ltrb[same])
    for name in ("bucket_index", "bucket_sizes", "resized_sizes", "crop_loss", "aspect_errors"):
        np.testing.assert_array_equal(getattr(found, name), getattr(place, name))
    assert (found.cuts >= 0).all()
    assert np.array_equal(found.cuts.reshape(-1, 2, 2).sum(axis=1), place.cuts.reshape(-1, 2, 2).sum(axis=1))
    with np.errstate(invalid="ignore"):
        assert not (cut_rectangles(found, focus) > cut_rectangles(place, focus)).any()


def test_crop_conditioning_is_what_is_really_cut_off_also_of_the_flipped_image() -> None:
    place = focused(OneBucket((512, 512)).place([(2001, 500)]), np.array([(0.0, 0.0, 0.1, 1.0)]))
    left, top, right, _ = place.cuts[0].tolist()
    assert left == 0
    assert right > 0
    box, bucket = place.crop_ltrb[0].tolist(), place.bucket_sizes[0].tolist()
    assert box[:2] == [left, top]
    assert bucket[0] - box[2] == right  # what sd-scripts takes for the left side of the flipped image


def test_a_point_between_pixels_is_as_wide_as_both() -> None:
    found = focus_pixels(np.array([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0]]), np.array([[100, 7], [4, 4]]))
    assert found.tolist() == [[49, 3, 51, 4], [0, 0, 1, 4]]
