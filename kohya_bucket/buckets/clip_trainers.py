"""How other trainers place clips, restated from their public behaviour so that a move can be judged beforehand.

Read-only, as the rules for images in `buckets/trainers/`: one item is made of a clip, and of how a trainer resizes only
the bucket is told, so that crops are counted alike. Sources: tdrussell/diffusion-pipe, `utils/dataset.py` and
`models/base.py`; huggingface/finetrainers, `functional/video.py`; hpcaitech/Open-Sora, `datasets/bucket.py` and
`datasets/aspect.py`. `compat_tests/test_other_clip_trainers.py` compares with the real code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips import ClipPlacement, FrameGrid, Spans, check_rate, clip_counts, used_buckets
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import OwnSizes
from kohya_bucket.buckets.sizes import IntArray, as_sizes
from kohya_bucket.buckets.trainers import DiffusionPipeBuckets, positive
from kohya_bucket.errors import BucketSettingsError

__all__ = ["CLIP_TRAINERS", "ClipModel", "DiffusionPipeClips", "FinetrainersClips", "OpenSoraClips"]


Counts = npt.NDArray[np.int64]
Rates = npt.NDArray[np.float64]


class ClipModel(NamedTuple):
    """What is trained, whoever trains it: size, numbers of frames, and what the model takes."""

    resolution: tuple[int, int]
    lengths: tuple[int, ...]
    grid: FrameGrid
    target_fps: float | None
    multiple: int = 16

    @property
    def side(self) -> int:
        """Of a square of the resolution's area."""
        width, height = self.resolution
        return round(math.sqrt(width * height))


class Taken(NamedTuple):
    """What is decided for N clips: [N, 2] sizes of buckets, 0 for none; [N] frames that the clip has there, 0 for none;
    and [N] frames from which these are taken."""

    sizes: IntArray
    lengths: Counts
    frames: Counts


class TrainerClips(ABC):
    """A trainer's own way with clips; `_take` decides.

    Attributes:
        spread: the frames of an item are spread over the whole clip, which plays faster then, and loses no time.
    """

    spread = False

    @abstractmethod
    def _take(self, sizes: IntArray, frames: Counts, fps: Rates) -> Taken:
        """For N readable clips; a rate of 0 is not known."""

    def place(self, sizes: npt.ArrayLike, frames: npt.ArrayLike, source_fps: npt.ArrayLike) -> ClipPlacement:
        """Place N clips; see `ClipBuckets.place`."""
        array = as_sizes(sizes)
        counts = clip_counts(frames, len(array))
        fps = np.broadcast_to(np.asarray(source_fps, dtype=np.float64), counts.shape)
        readable = (array.min(axis=1, initial=1) > 0) & (counts > 0)
        pictures = np.zeros((len(array), 2), dtype=np.int32)
        lengths, left = np.zeros_like(counts), np.zeros_like(counts)
        pictures[readable], lengths[readable], left[readable] = self._take(
            array[readable], counts[readable], fps[readable]
        )
        reasons = np.where(readable, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
        reasons[readable & (pictures.min(axis=1, initial=1) < 1)] = Reason.NO_SMALLER_BUCKET
        picture = OwnSizes(array, pictures, reasons).placement()
        clip = np.flatnonzero(picture.placed & (lengths > 0))
        spans = Spans(clip, np.zeros_like(clip), lengths[clip])
        reasons = picture.reasons.copy()
        reasons[picture.placed & (lengths < 1)] = Reason.TOO_SHORT
        return ClipPlacement(picture, left, spans, *used_buckets(picture, spans), reasons)


class DiffusionPipeClips(TrainerClips):
    """The picture as an image's; the longest listed length within the frames at the model's rate; a length is rounded
    down to the grid when it is cached. A clip of more than one frame never becomes an image.

    Args:
        picture: the rule for images.
        lengths: `frame_buckets`; 1 is always one of them.
        target_fps: the model's rate; None for clips that have it already.
        grid: the model's.
    """

    def __init__(
        self,
        picture: DiffusionPipeBuckets,
        lengths: Iterable[int],
        target_fps: float | None = None,
        grid: FrameGrid | None = None,
    ) -> None:
        self._picture, self._grid = picture, grid or FrameGrid()
        self._lengths = np.array(sorted({1, *lengths}), dtype=np.int64)
        positive(frame_buckets=int(self._lengths[0]))
        self._target = None if target_fps is None else check_rate("target_fps", target_fps)

    def _take(self, sizes: IntArray, frames: Counts, fps: Rates) -> Taken:
        if self._target is not None:
            rate = np.divide(frames * self._target, fps, out=np.zeros(len(fps)), where=fps > 0)
            frames = rate.astype(np.int64)
        lengths = self._lengths[np.maximum(np.searchsorted(self._lengths, frames, side="right") - 1, 0)]
        none = (frames < 1) | ((frames > 1) & (lengths == 1))
        return Taken(self._picture.place(sizes).bucket_sizes, np.where(none, 0, self._grid.floor(lengths)), frames)


class FinetrainersClips(TrainerClips):
    """Among the listed buckets those with most frames within the clip's, and of these the nearest aspect. Rates do not
    matter: frames are picked evenly over the whole clip. A clip shorter than all keeps its own number of frames.

    Args:
        buckets: `video_resolution_buckets`, here as (width, height, frames).
    """

    spread = True

    def __init__(self, buckets: Iterable[tuple[int, int, int]]) -> None:
        listed = sorted(set(buckets), key=lambda b: (b[2], -b[1], -b[0]))
        if not listed:
            raise BucketSettingsError("no bucket is listed: name at least one, e.g. (832, 480, 49)")
        positive(**{"the smallest number of a bucket": min(map(min, listed))})
        self._buckets = np.array(listed, dtype=np.int64)

    def _take(self, sizes: IntArray, frames: Counts, fps: Rates) -> Taken:
        lengths = np.unique(self._buckets[:, 2])
        chosen = lengths[np.maximum(np.searchsorted(lengths, frames, side="right") - 1, 0)]
        pictures = np.zeros_like(sizes)
        aspect = sizes[:, 0] / sizes[:, 1]
        for length in lengths.tolist():
            mine = chosen == length
            group = self._buckets[self._buckets[:, 2] == length, :2]
            nearest = np.abs(group[:, 0] / group[:, 1] - aspect[mine, None]).argmin(axis=1)
            pictures[mine] = group[nearest]
        return Taken(pictures, np.minimum(chosen, frames), frames)


class OpenSoraClips(TrainerClips):
    """One resolution of a `bucket_config` with probability 1: frames are left out until the rate is at most `fps_max`,
    the longest listed length that fits, the nearest `h/w` of its aspects. Clips below 80% of the area have no bucket.

    Args:
        resolution: side in pixels, as in `256px`.
        lengths: numbers of frames; 1 is for images only.
        fps_max: the highest rate; 24 in its training configs.
    """

    def __init__(self, resolution: int, lengths: Iterable[int], fps_max: float = 24) -> None:
        if resolution < 64:
            raise BucketSettingsError(f"resolution is {resolution}, but must be 64 or more")
        self._area, self._fps_max = resolution**2, check_rate("fps_max", fps_max)
        self._lengths = np.array(sorted(set(lengths)), dtype=np.int64)
        positive(lengths=int(self._lengths.min(initial=1)))
        shapes = open_sora_shapes(self._area)
        self._aspects = np.array([height / width for width, height in shapes])
        self._sizes = np.array(list(shapes.values()), dtype=np.int32)

    def _take(self, sizes: IntArray, frames: Counts, fps: Rates) -> Taken:
        frames = frames // np.where(fps < self._fps_max, 1, np.ceil(fps / self._fps_max)).astype(np.int64)
        width, height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
        pictures = self._sizes[np.abs((height / width)[:, None] - self._aspects).argmin(axis=1)]
        pictures[width * height < self._area * 0.8] = 0
        of_clips = np.array([0, *self._lengths[self._lengths > 1]], dtype=np.int64)
        lengths = of_clips[np.maximum(np.searchsorted(of_clips, frames, side="right") - 1, 0)]
        lengths[frames == 1] = int(1 in self._lengths)
        return Taken(pictures, lengths, frames)


def open_sora_shapes(area: int, step: int = 16) -> dict[tuple[float, float], tuple[int, int]]:
    """{(width, height) of an aspect: (width, height) of its bucket}; a size that two aspects share is the first's."""
    upright: dict[tuple[float, float], tuple[int, int]] = {}
    turned: dict[tuple[float, float], tuple[int, int]] = {}
    for wide, high in ((2.39, 1.0), (2.0, 1.0), (16.0, 9.0), (1.85, 1.0), (9.0, 16.0), (5.0, 8.0), (3.0, 2.0),
                       (4.0, 3.0), (1.0, 1.0)):  # fmt: skip
        w = int(math.sqrt(area * (wide / high)) // step) * step
        h = int((area / w) // step) * step
        near = [(w, h), (w, h - step), (w, h + step), (w - step, h), (w + step, h)]
        size = min(near, key=lambda s: abs(s[0] * s[1] - area))
        if size not in upright.values():
            upright[wide, high] = size
            turned[high, wide] = size[::-1]
    return upright | turned


def _diffusion_pipe(model: ClipModel) -> TrainerClips:
    picture = DiffusionPipeBuckets(model.side, multiple=model.multiple)
    return DiffusionPipeClips(picture, model.lengths, model.target_fps, model.grid)


# finetrainers has the buckets that its user lists: here one for each length, at the resolution.
CLIP_TRAINERS: Mapping[str, Callable[[ClipModel], TrainerClips]] = {
    "diffusion-pipe": _diffusion_pipe,
    "finetrainers": lambda model: FinetrainersClips((*model.resolution, length) for length in model.lengths),
    "open-sora": lambda model: OpenSoraClips(model.side, model.lengths),
}
"""The trainers by name, with what makes their rule with their usual values."""
