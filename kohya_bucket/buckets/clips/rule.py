"""Clips in buckets: the frames go where an image of their size goes, and runs of them have listed lengths."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips.frame_grid import FrameGrid
from kohya_bucket.buckets.clips.frame_rate import MOST_FRAMES, check_rate, frames_at_rate
from kohya_bucket.buckets.clips.placement import ClipPlacement
from kohya_bucket.buckets.clips.spans import Extraction, Spans, take_spans
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.rule import BucketRule, check_rule
from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.errors import BucketSettingsError

__all__ = ["ClipBuckets", "clip_counts", "used_buckets"]


class ClipBuckets:
    """Buckets of width, height and frames.

    Args:
        picture: the rule that places a frame as an image.
        lengths: numbers of frames that may be trained; each is rounded down to the grid. Of no account for the
            extraction `full`.
        grid: the numbers of frames that the model takes.
        extraction: which runs of frames are taken of a clip; `EXTRACTIONS` says what the names mean.
        stride: frames from one run to the next for `slide`.
        sample: runs of each length for `uniform`.
        max_frames: the longest run for `full`; None for no limit.
        target_fps: the rate of the model, to which clips are brought by dropping frames; None leaves them as they are.

    Raises:
        BucketSettingsError: lengths, numbers or names from which nothing follows.
    """

    def __init__(
        self,
        picture: BucketRule,
        lengths: Iterable[int] = (1,),
        *,
        grid: FrameGrid | None = None,
        extraction: str = "largest",
        stride: int = 1,
        sample: int = 1,
        max_frames: int | None = None,
        target_fps: float | None = None,
    ) -> None:
        check_rule(picture)
        self.picture, self.grid = picture, grid or FrameGrid()
        self.extraction = Extraction(extraction, stride, sample, max_frames).checked()
        self.lengths = () if self.extraction.name == "full" else self.grid.lengths(lengths)
        self.target_fps = None if target_fps is None else check_rate("target_fps", target_fps)

    def place(
        self, sizes: npt.ArrayLike, frames: npt.ArrayLike, source_fps: npt.ArrayLike | None = None
    ) -> ClipPlacement:
        """Place N clips.

        Args:
            sizes: [N, 2] (width, height) of their frames; a side below 1 counts as unreadable.
            frames: [N] how many each has; below 1 counts as unreadable.
            source_fps: frames per second, of all or [N] of each; None converts none.

        Raises:
            BucketSettingsError: counts that are none, or a rate of 0.
        """
        array = as_sizes(sizes)
        counts = clip_counts(frames, len(array))
        picture = self.picture.place(array)
        counts = np.where(array.min(axis=1, initial=1) < 1, 0, counts)
        loaded = counts
        if source_fps is not None and self.target_fps is not None:
            loaded = frames_at_rate(counts, source_fps, self.target_fps, self._end)
            counts = frames_at_rate(counts, source_fps, self.target_fps)
        spans = take_spans(np.where(picture.placed, loaded, 0), self.lengths, self.extraction, self.grid)
        buckets, index = used_buckets(picture, spans)
        reasons = picture.reasons.copy()
        reasons[picture.placed & (np.bincount(spans.clip, minlength=len(array)) < 1)] = Reason.TOO_SHORT
        reasons[counts < 1] = Reason.UNREADABLE
        return ClipPlacement(picture, counts, spans, buckets, index, reasons)

    @property
    def _end(self) -> int | None:
        """Where musubi-tuner stops loading: for `head` at the longest length, whatever it has loaded till then."""
        return self.lengths[-1] if self.extraction.name == "head" else None


def used_buckets(picture: Placement, spans: Spans) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """[K, 3] buckets in use, and [M] the position of each run's."""
    rows = np.column_stack([picture.bucket_sizes[spans.clip], spans.length]).astype(np.int32)
    if not len(rows):
        return rows, np.zeros(0, dtype=np.int32)
    buckets, index = np.unique(rows, axis=0, return_inverse=True)
    return buckets, index.reshape(-1).astype(np.int32)


def clip_counts(frames: npt.ArrayLike, clips: int) -> npt.NDArray[np.int64]:
    """[N] frames of so many clips; below 0 counts as 0. `BucketSettingsError` for what no count can be."""
    array = np.asarray(frames)
    if array.shape != (clips,) or (array.size and array.dtype.kind not in "iu"):
        raise BucketSettingsError(f"frames must be {clips} whole numbers, one for each clip, got {array!r:.80}")
    if array.max(initial=0) > MOST_FRAMES:
        raise BucketSettingsError(f"a clip of {int(array.max()):,} frames, but no clip can have above {MOST_FRAMES:,}")
    return np.maximum(array.astype(np.int64), 0)
