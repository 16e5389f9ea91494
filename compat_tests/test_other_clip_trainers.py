"""diffusion-pipe's real code for clips, taken from a checkout, against the rule restated here, row by row.

It needs a checkout in DIFFUSION_PIPE_DIR. Only the functions
that decide are executed, taken out of their files; containers and tensors are stood in for by their sizes and rates.
"""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from compat_tests.test_other_trainers import source, take
from kohya_bucket.buckets.clips import FrameGrid
from kohya_bucket.buckets.trainers import DiffusionPipeBuckets, DiffusionPipeClips

RNG = np.random.default_rng(15)
N = 4000
SIZES = np.concatenate([RNG.integers(64, 3000, (N // 2, 2)), RNG.integers(1, 40, (N // 2, 2)) * 64])
FRAMES = np.where(RNG.random(N) < 0.5, RNG.integers(1, 60, N), RNG.integers(1, 600, N))
RATES = np.where(RNG.random(N) < 0.5, RNG.choice([8, 12, 15, 16, 24000 / 1001, 24, 25, 30000 / 1001, 30, 48, 60], N),
                 RNG.uniform(1, 120, N))  # fmt: skip


def compare(rule, theirs) -> None:
    """(width, height, frames) of the item of each clip; None for a clip that is not trained."""
    placed = rule.place(SIZES, FRAMES, RATES)
    mine = dict(zip(placed.spans.clip.tolist(), placed.buckets[placed.bucket_index].tolist(), strict=True))
    different = []
    for i, ((width, height), frames, fps) in enumerate(
        zip(SIZES.tolist(), FRAMES.tolist(), RATES.tolist(), strict=True)
    ):
        their = theirs(width, height, frames, fps)
        if mine.get(i) != (None if their is None else list(their)):
            different.append(((width, height, frames, fps), mine.get(i), their))
    assert not different, f"{len(different)} of {N} differ, e.g. {different[:5]}"
    assert len(mine) > 0
    print(f"\n{type(rule).__name__}: {N} clips equal, {len(mine)} trained in {len(placed.buckets)} buckets")


def nothing(*_, **__) -> None:
    """What is not asked for."""


def _directory(taken, lengths, framerate):
    directory = object.__new__(taken.DirectoryDataset)
    directory.ars = taken.dedup_and_sort(np.geomspace(0.5, 2.0, num=7))
    directory.log_ars = np.log(directory.ars)
    directory.frame_buckets = np.array(sorted({1, *lengths}))
    directory.framerate, directory.use_size_buckets = framerate, False
    directory.control_path, directory.shuffle, directory.shuffle_delimiter = None, 0, ", "
    directory.directory_config = {"shuffle_tags": False, "caption_prefix": ""}
    return directory


@pytest.mark.parametrize(
    ("lengths", "framerate", "stride", "multiple", "side"),
    [((33,), 16, 4, 16, 512), ((1, 25, 45, 81), 24, 4, 16, 723), ((10, 30, 97, 200), 25, 8, 32, 640)],
)
def test_diffusion_pipe(lengths, framerate, stride, multiple, side, tmp_path) -> None:
    file = source("DIFFUSION_PIPE_DIR", "utils/dataset.py")
    common = take(
        source("DIFFUSION_PIPE_DIR", "utils/common.py"), {"round_to_nearest_multiple", "round_down_to_multiple"}
    )
    clip = {}
    video = SimpleNamespace(
        get_dimensions=lambda: clip["size"],
        get_frame_count=lambda: clip["frames"],
        get_frame_rate=lambda: clip["fps"],
    )
    names = {"dedup_and_sort", "ROUND_DECIMAL_DIGITS", "DirectoryDataset", "ARBucketDataset", "shuffle_captions",
             "bucket_suffix"}  # fmt: skip
    made = []

    def size_bucket(*given):
        made.append(given[2])
        return SimpleNamespace(cache_latents=nothing)

    taken = take(
        file, names, Path=Path, VIDEO_EXTENSIONS={".mp4"}, logger=logging.getLogger("theirs"),
        InputImpl=SimpleNamespace(VideoFromFile=lambda _: video), SizeBucketDataset=size_bucket,
        round_to_nearest_multiple=common.round_to_nearest_multiple,
    )  # fmt: skip
    base = source("DIFFUSION_PIPE_DIR", "models/base.py")
    media = take(base, {"PreprocessMediaFile"}, round_down_to_multiple=common.round_down_to_multiple)
    loader = object.__new__(media.PreprocessMediaFile)
    loader.round_frames, loader.tarfile_map = stride, {}
    decide = _directory(taken, lengths, framerate)._metadata_map_fn()
    sizes = {}

    def theirs(width, height, frames, fps):
        clip.update(size=(width, height), frames=frames, fps=fps)
        example = {"caption_file": [None], "image_spec": [(None, "a.mp4")], "caption": [["a"]], "mask_file": [None]}
        (bucket,) = decide(example)["ar_bucket"] or (None,)
        if bucket is None:
            return None
        if bucket not in sizes:
            data = taken.ARBucketDataset(bucket, [side], SimpleNamespace(map=nothing),
                                         {"path": str(tmp_path)}, tmp_path, multiple, None)  # fmt: skip
            data.cache_latents(None)
            sizes[bucket] = made[-1][1:]
        w, h, length = sizes[bucket]
        length = loader.align_frames(length)
        whole = np.arange(int(frames * framerate / fps))[None]
        cut = loader.extract_clips(whole, None, length, "single_beginning")
        assert [part.shape[1] for part, _ in cut] == [length]
        return w, h, length

    picture = DiffusionPipeBuckets(side, multiple=multiple)
    compare(DiffusionPipeClips(picture, lengths, framerate, FrameGrid(stride, 1)), theirs)
