"""NovelAI's set and placement; whole epochs are compared in `compat_tests/`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import NovelAIBuckets, load_preset
from kohya_bucket.buckets import Reason
from kohya_bucket.errors import BucketSettingsError

DEFAULT = (
    "256x1024 320x1024 384x1024 384x960 384x896 448x832 512x768 512x704 512x512 576x640 640x576 704x512 768x512 "
    "832x448 896x384 960x384 1024x384 1024x320 1024x256"
)
sides = st.integers(1, 8192)


def test_the_published_set() -> None:
    assert " ".join(map(str, NovelAIBuckets().bucket_set)) == DEFAULT
    assert load_preset("novelai").buckets == NovelAIBuckets().bucket_set.buckets


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=40), st.sampled_from([4, 1, 0.25]))
def test_nearest_aspect_or_pruned(sizes, max_ar_error) -> None:
    rule = NovelAIBuckets(max_ar_error=max_ar_error)
    placement = rule.place(sizes)
    for i, (width, height) in enumerate(sizes):
        distances = np.abs(rule.bucket_set.aspects - width / height)
        if distances.min() < max_ar_error:
            assert placement.bucket_index[i] == distances.argmin()
        else:
            assert placement.reason(i) is Reason.ASPECT_ERROR


def test_only_the_aspect_decides() -> None:
    # 512x512 and 1024x1024 are both in this set and both square: the first one takes every square image.
    rule = NovelAIBuckets(1024, base_res=(512, 512), dim_limit=1024, min_dim=512)
    assert [str(rule.assign(*s)) for s in [(512, 512), (1024, 1024)]] == ["512x512", "512x512"]


def test_a_base_size_added_by_hand_counts_as_square() -> None:
    rule = NovelAIBuckets((768, 512), base_res=(640, 512))
    assert rule.aspects[rule.bucket_set.buckets.index(rule.assign(512, 512))] == 1.0
    assert str(rule.assign(512, 512)) == "640x512"


@pytest.mark.parametrize("options", [{"min_dim": 1024, "dim_limit": 512}, {"divisible": 0}, {"max_ar_error": 0}])
def test_settings_without_a_bucket_are_refused(options) -> None:
    with pytest.raises(BucketSettingsError):
        NovelAIBuckets(**options)


units = st.integers(1, 12)


@given(units, units, units, st.integers(1, 24), st.tuples(units, units), st.sampled_from([8, 32, 64]))
def test_the_set_is_what_the_published_text_says(across, down, shortest, longest, base, step) -> None:
    area, low, high = across * down * step * step, shortest * step, longest * step
    # "Find the largest height such that it is at most the limit and the area is at most the maximum."
    sizes, on_the_way = set(), False
    for width in range(low, high + 1, step):
        heights = [h for h in range(low, high + 1, step) if width * h <= area]
        if heights:
            sizes |= {(width, heights[-1]), (heights[-1], width)}
            on_the_way |= width == base[0] * step and base[1] * step in heights
    if not sizes:
        with pytest.raises(BucketSettingsError):
            NovelAIBuckets((across * step, down * step), step, low, (base[0] * step, base[1] * step), high)
        return
    if on_the_way:
        sizes.add((base[0] * step, base[1] * step))
    rule = NovelAIBuckets((across * step, down * step), step, low, (base[0] * step, base[1] * step), high)
    assert {b.as_tuple() for b in rule.bucket_set} == sizes
    assert all(b.pixel_count <= area and low <= min(b) and max(b) <= high for b in rule.bucket_set)
    order = [(b.width, -b.height) for b in rule.bucket_set]
    assert order == sorted(order)
