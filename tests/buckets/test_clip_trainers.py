"""Other trainers' rules for clips; equality with their code is tested in `compat_tests/`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_bucket import BucketSettingsError
from kohya_bucket.buckets.clip_trainers import (
    CLIP_TRAINERS,
    ClipModel,
    DiffusionPipeClips,
    FinetrainersClips,
    OpenSoraClips,
)
from kohya_bucket.buckets.clips import FrameGrid
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.trainers import DiffusionPipeBuckets

MODEL = ClipModel((832, 480), (1, 25, 49), FrameGrid(), 16.0)
rates = st.sampled_from([8.0, 16.0, 24000 / 1001, 24.0, 30.0, 60.0])
clips = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 300), rates), min_size=1, max_size=25
)


@pytest.mark.parametrize("name", CLIP_TRAINERS)
@given(clips=clips, seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_the_laws_of_every_rule(name, clips, seed) -> None:
    rule = CLIP_TRAINERS[name](MODEL)
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
    fine = FinetrainersClips([(832, 480, 49), (480, 832, 49), (512, 512, 25)])
    assert items(fine, (600, 800), 50, 30.0) == [[480, 832, 49]]
    assert items(fine, (600, 800), 48, 30.0) == [[512, 512, 25]]
    assert items(fine, (600, 800), 7, 30.0) == [[512, 512, 7]]
    sora = OpenSoraClips(256, (1, 25, 49))
    assert items(sora, (1280, 720), 120, 48.0) == [[336, 192, 49]]  # 60 frames at 24 per second
    assert items(sora, (200, 200), 120, 24.0) == []
    assert sora.place([(200, 200)], [120], [24.0]).reason(0) is Reason.NO_SMALLER_BUCKET


def test_what_follows_from_nothing_is_refused() -> None:
    for make in (
        lambda: FinetrainersClips([]),
        lambda: FinetrainersClips([(0, 480, 49)]),
        lambda: OpenSoraClips(32, (1, 25)),
        lambda: OpenSoraClips(256, (0, 25)),
        lambda: OpenSoraClips(256, (25,), fps_max=0),
        lambda: DiffusionPipeClips(DiffusionPipeBuckets(512), (0,)),
        lambda: DiffusionPipeClips(DiffusionPipeBuckets(512), (25,), float("nan")),
    ):
        with pytest.raises(BucketSettingsError):
            make()
