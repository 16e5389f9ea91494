"""How diffusion-pipe places clips, restated from its public behaviour so that a move can be judged beforehand.

Read-only, as the rules in `trainers.py`: of how it resizes only the bucket is told, so that crops are counted
alike. Source: tdrussell/diffusion-pipe, `utils/dataset.py` and `models/base.py`, with which
`compat_tests/test_other_clip_trainers.py` compares.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips import ClipPlacement, FrameGrid, Spans, check_rate, clip_counts, used_buckets
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.buckets.trainers import DiffusionPipeBuckets, positive


class DiffusionPipeClips:
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

    def place(self, sizes: npt.ArrayLike, frames: npt.ArrayLike, source_fps: npt.ArrayLike) -> ClipPlacement:
        """Place N clips, each as one item from its start; see `ClipBuckets.place`. A rate of 0 is not known."""
        array = as_sizes(sizes)
        counts = np.where(array.min(axis=1, initial=1) > 0, clip_counts(frames, len(array)), 0)
        fps = np.broadcast_to(np.asarray(source_fps, dtype=np.float64), counts.shape)
        left = counts
        if self._target is not None:
            rate = np.divide(counts * self._target, fps, out=np.zeros(len(fps)), where=fps > 0)
            left = rate.astype(np.int64)
        lengths = self._lengths[np.maximum(np.searchsorted(self._lengths, left, side="right") - 1, 0)]
        none = (left < 1) | ((left > 1) & (lengths == 1))
        lengths = np.where(none, 0, self._grid.floor(lengths))
        picture = self._picture.place(np.where(counts[:, None] > 0, array, 0).astype(np.int32))
        clip = np.flatnonzero(picture.placed & (lengths > 0))
        spans = Spans(clip, np.zeros_like(clip), lengths[clip])
        reasons = picture.reasons.copy()
        reasons[picture.placed & (lengths < 1)] = Reason.TOO_SHORT
        return ClipPlacement(picture, left, spans, *used_buckets(picture, spans), reasons)
