"""diffusion-pipe's rule for clips; equality with its code is tested in `compat_tests/`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_bucket import BucketSettingsError
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.trainers import DiffusionPipeBuckets, DiffusionPipeClips

rates = st.sampled_from([8.0, 16.0, 24000 / 1001, 24.0, 30.0, 60.0])
clips = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 300), rates), min_size=1, max_size=25
)


@given(clips=clips, seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_laws_of_rules_for_clips(clips, seed) -> None:
    rule = DiffusionPipeClips(DiffusionPipeBuckets(632), (1, 25, 49), 16.0)
    width, height, frames, fps = (np.array(column) for column in zip(*clips, strict=True))
    sizes = np.column_stack([width, height])
    placed = rule.place(sizes, frames, fps)
    order = np.random.default_rng(seed).permutation(len(clips))
    other = rule.place(sizes[order], frames[order], fps[order])
    for mine, theirs in ((placed.kept, other.kept), (placed.frames, other.frames), (placed.reasons, other.reasons)):
        np.testing.assert_array_equal(mine[order], theirs)
    assert (placed.items_per_clip == placed.placed).all()
    assert (placed.kept <= placed.frames).all()
    assert ((placed.reasons == Reason.UNREADABLE) == ((sizes.min(axis=1) < 1) | (frames < 1))).all()
    np.testing.assert_array_equal(placed.buckets[placed.bucket_index, 2], placed.kept[placed.spans.clip])
    np.testing.assert_array_equal(
        placed.buckets[placed.bucket_index, :2], placed.picture.bucket_sizes[placed.spans.clip]
    )


def items(rule, clip, frames, fps) -> list[list[int]]:
    return rule.place([clip], [frames], [fps]).buckets.tolist()


def test_what_each_takes_of_a_clip() -> None:
    pipe = DiffusionPipeClips(DiffusionPipeBuckets(512), (30, 60), 16)
    assert items(pipe, (512, 512), 60, 30.0) == [[512, 512, 29]]  # 32 frames at 16 per second; 30 is 29 on 4n+1
    assert items(pipe, (512, 512), 55, 30.0) == []  # 29 frames, and a clip is no image
    assert items(pipe, (512, 512), 2, 30.0) == [[512, 512, 1]]  # one frame at 16 per second
    assert items(pipe, (512, 512), 60, 0.0) == []


def test_what_follows_from_nothing_is_refused() -> None:
    for make in (
        lambda: DiffusionPipeClips(DiffusionPipeBuckets(512), (0,)),
        lambda: DiffusionPipeClips(DiffusionPipeBuckets(512), (25,), float("nan")),
    ):
        with pytest.raises(BucketSettingsError):
            make()
