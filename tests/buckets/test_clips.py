"""What holds of clips in buckets, whatever they are. Rows that musubi-tuner computed: `compat_tests`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import KohyaBuckets
from kohya_bucket.buckets.clips import EXTRACTIONS, ClipBuckets, FrameGrid, frames_at_rate
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.errors import BucketSettingsError

PICTURE = KohyaBuckets((512, 512))
COUNTS = st.lists(st.integers(0, 400), min_size=1, max_size=8)
GRIDS = st.builds(FrameGrid, st.sampled_from([1, 4, 8, 17]), st.sampled_from([1, 5]))
LENGTHS = st.lists(st.integers(5, 300), min_size=1, max_size=4)
RATES = st.sampled_from([8.0, 12.0, 16.0, 23.976, 24.0, 29.97, 30.0, 60.0])


@given(COUNTS, LENGTHS, GRIDS, st.sampled_from([*EXTRACTIONS]), st.integers(1, 40), st.integers(1, 9), RATES, RATES)
def test_every_run_lies_within_its_clip_and_on_the_grid(counts, lengths, grid, name, stride, sample, source, target):
    rule = ClipBuckets(
        PICTURE, lengths, grid=grid, extraction=name, stride=stride, sample=sample, max_frames=81, target_fps=target
    )
    placed = rule.place([(640, 480)] * len(counts), counts, source)
    spans = placed.spans
    assert (placed.frames <= np.array(counts)).all()
    assert (spans.start >= 0).all()
    assert (spans.start + spans.length <= placed.frames[spans.clip]).all()
    assert grid.floor(spans.length).tolist() == spans.length.tolist()
    if name == "full":
        assert spans.length.max(initial=0) <= 81
    else:
        assert set(spans.length.tolist()) <= set(grid.lengths(lengths))
    rows = np.column_stack([spans.clip, spans.start, spans.length])
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert (np.diff(spans.clip) >= 0).all()
    assert placed.items_per_bucket.sum() == len(spans)
    assert (placed.items_per_bucket > 0).all()
    assert (placed.placed == (np.bincount(spans.clip, minlength=len(placed)) > 0)).all()
    for i, count in enumerate(counts):
        inside = np.zeros(count, dtype=bool)
        for _, start, length in rows[rows[:, 0] == i]:
            inside[start : start + length] = True
        assert placed.kept[i] == inside.sum()
        if not count:
            assert placed.reason(i) is Reason.UNREADABLE
        elif not placed.placed[i]:
            assert placed.reason(i) is Reason.TOO_SHORT
    where = placed.buckets[placed.bucket_index]
    assert where[:, 2].tolist() == spans.length.tolist()
    assert where[:, :2].tolist() == placed.picture.bucket_sizes[spans.clip].tolist()


@given(COUNTS, LENGTHS)
def test_largest_takes_the_longest_that_fits_and_head_takes_all(counts, lengths):
    grid = FrameGrid()
    sizes = [(640, 480)] * len(counts)
    largest = ClipBuckets(PICTURE, lengths).place(sizes, counts).spans
    head = ClipBuckets(PICTURE, lengths, extraction="head").place(sizes, counts).spans
    for i, count in enumerate(counts):
        fitting = [length for length in grid.lengths(lengths) if length <= count]
        assert head.length[head.clip == i].tolist() == fitting
        assert largest.length[largest.clip == i].tolist() == fitting[-1:]


def test_frames_that_are_not_loaded_count_as_dropped():
    """`head` loads no more than its longest length, whatever else a clip has."""
    for source, target, frames, kept in [(60.0, 30.0, 200, 25), (24.0, 24.0, 400, 25), (12.0, 24.0, 400, 9)]:
        placed = ClipBuckets(PICTURE, [9, 25], extraction="head", target_fps=target).place([(64, 64)], [400], source)
        assert (placed.frames.tolist(), placed.kept.tolist()) == ([frames], [kept])


@given(st.integers(1, 5000), RATES, RATES)
def test_frames_at_another_rate(count, source, target):
    (kept,) = frames_at_rate([count], source, target).tolist()
    if target >= source:
        assert kept == count
    else:
        assert abs(kept - count * target / source) <= 1
    ends = [int(frames_at_rate([count], source, target, end)[0]) for end in (0, kept // 2, kept, count + 1)]
    assert ends[0] == 0
    assert ends == sorted(ends)
    assert ends[-1] == kept or target > source


def test_many_clips_are_placed_as_one_is():
    draws = np.random.default_rng(3)
    sizes, counts = draws.integers(100, 3000, (200, 2)), draws.integers(0, 300, 200)
    rates = draws.choice([23.976, 30.0, 60.0], 200)
    for name in EXTRACTIONS:
        rule = ClipBuckets(PICTURE, [1, 25, 49], extraction=name, stride=7, sample=3, max_frames=121, target_fps=16)
        together = rule.place(sizes, counts, rates)
        for i in range(200):
            alone = rule.place(sizes[i : i + 1], counts[i : i + 1], rates[i : i + 1])
            mine = together.spans.clip == i
            assert alone.spans.start.tolist() == together.spans.start[mine].tolist()
            assert alone.spans.length.tolist() == together.spans.length[mine].tolist()
            assert (alone.frames[0], alone.kept[0]) == (together.frames[i], together.kept[i])


def test_a_frame_goes_where_an_image_of_its_size_goes():
    sizes = [(576, 768), (768, 512), (0, 0), (1920, 1080)]
    placed = ClipBuckets(PICTURE, [17]).place(sizes, [20, 20, 20, 20])
    assert placed.picture.bucket_sizes.tolist() == PICTURE.place(sizes).bucket_sizes.tolist()
    assert [placed.reason(i) for i in range(4)] == [0, 0, Reason.UNREADABLE, 0]
    assert placed.spans.clip.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": []}, "no number of frames is listed"),
        ({"lengths": [0]}, "0 frames are listed, but the shortest clip of 4n\\+1 has 1"),
        ({"extraction": "heads"}, "extraction is 'heads'.*'head'"),
        ({"stride": 0}, "stride is 0"),
        ({"target_fps": 0}, "target_fps is 0, but must be frames per second above 0"),
        ({"picture": KohyaBuckets}, "rule is the class KohyaBuckets"),
    ],
)
def test_what_cannot_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ClipBuckets(**{"picture": PICTURE, "lengths": [1], **change})


def test_hostile_counts_are_refused_before_they_fill_the_memory():
    rule = ClipBuckets(PICTURE, [1], extraction="slide")
    with pytest.raises(BucketSettingsError, match="a clip of 10,000,001 frames"):
        rule.place([(64, 64)], [10_000_001])
    with pytest.raises(BucketSettingsError, match="110,000,000 runs of 1 frames would be taken"):
        rule.place([(512, 512)] * 11, [10_000_000] * 11)
    with pytest.raises(BucketSettingsError, match="runs of 1 frames would be taken"):
        ClipBuckets(PICTURE, [1], extraction="uniform", sample=10**9).place([(512, 512)], [5])
    with pytest.raises(BucketSettingsError, match="frames must be 1 whole numbers"):
        rule.place([(64, 64)], [1.5])
    for rate in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BucketSettingsError, match="source_fps is"):
            frames_at_rate([10], rate, 16)


@pytest.mark.parametrize("rate", [0, -5, np.nan, np.inf, [25.0, 0.0]])
def test_by_time_a_rate_that_is_none_is_refused(rate) -> None:
    with pytest.raises(BucketSettingsError, match="source_fps is"):
        ClipBuckets(PICTURE, [5], target_fps=24.0, by_time=True).place([(640, 480)] * 2, [100, 100], rate)


def test_by_time_a_clip_has_the_frames_of_its_seconds() -> None:
    rule = ClipBuckets(PICTURE, [5], target_fps=24.0, by_time=True)
    assert rule.place([(640, 480)] * 3, [100, 101, 1], 25.0).frames.tolist() == [96, 97, 1]
    assert rule.place([(640, 480)], [100]).frames.tolist() == [100]
    assert ClipBuckets(PICTURE, [5], by_time=True).place([(640, 480)], [100], 25.0).frames.tolist() == [100]
