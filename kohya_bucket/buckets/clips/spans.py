"""Which runs of a clip's frames are trained, each as an item of its own.

Source of all but `largest`: kohya-ss/musubi-tuner, `VideoDataset.retrieve_latent_cache_batches`. There two equal runs
of a clip share a cache, so each is here once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.choices import EXTRACTIONS
from kohya_bucket.buckets.clips.frame_grid import FrameGrid
from kohya_bucket.checks import one_of
from kohya_bucket.errors import BucketSettingsError

__all__ = ["Extraction", "Spans", "take_spans"]

Counts = npt.NDArray[np.int64]

_MOST_SPANS = 100_000_000


@dataclass(frozen=True)
class Spans:
    """M runs of frames of N clips, ordered by clip, then by length, then by start.

    Attributes:
        clip: [M] position of the clip.
        start: [M] first frame, counted at the rate that the clip is trained at.
        length: [M] frames.
    """

    clip: Counts
    start: Counts
    length: Counts

    def __len__(self) -> int:
        return len(self.clip)

    def covered(self, clips: int) -> Counts:
        """[N] how many frames of each clip are in at least one run."""
        ends = self.start + self.length
        stride = int(ends.max(initial=0)) + 1
        order = np.lexsort((self.start, self.clip))
        base = self.clip[order] * stride
        starts, ends = base + self.start[order], base + ends[order]
        reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
        new = np.maximum(ends - np.maximum(starts, reached), 0)
        return np.bincount(self.clip[order], weights=new, minlength=clips).astype(np.int64)


class Extraction(NamedTuple):
    """How runs are taken; `EXTRACTIONS` says what the names mean."""

    name: str = "largest"
    stride: int = 1
    sample: int = 1
    max_frames: int | None = None

    def checked(self) -> Extraction:
        """The same, if it can be done; `uniform` with one sample is `head`.

        Raises:
            BucketSettingsError: an unknown name, or a number below 1.
        """
        one_of("frame_extraction", self.name, EXTRACTIONS, BucketSettingsError)
        numbers = {"frame_stride": self.stride, "frame_sample": self.sample, "max_frames": self.max_frames}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise BucketSettingsError(f"{name} is {value}, but must be 1 or more")
        return self._replace(name="head") if self.name == "uniform" and self.sample == 1 else self


def take_spans(frames: npt.ArrayLike, lengths: Sequence[int], how: Extraction, grid: FrameGrid) -> Spans:
    """The runs that are trained of N clips.

    Args:
        frames: [N] frames of each clip, at the rate it is trained at; 0 where it could not be read.
        lengths: [L] on the grid, ascending; of no account for `full`.
        how: checked.

    Raises:
        BucketSettingsError: more runs than anybody could train.
    """
    counts = np.asarray(frames, dtype=np.int64)
    if how.name == "full":
        most = counts if how.max_frames is None else np.minimum(counts, how.max_frames)
        whole = grid.floor(most)
        clip = np.flatnonzero(whole > 0)
        return Spans(clip, np.zeros_like(clip), whole[clip])
    if how.name == "largest":
        fitting = np.searchsorted(np.asarray(lengths), counts, side="right") - 1
        clip = np.flatnonzero(fitting >= 0)
        return Spans(clip, np.zeros_like(clip), np.asarray(lengths, dtype=np.int64)[fitting[clip]])
    per_length = [(length, *_of_length(counts, length, how)) for length in lengths]
    clip = np.concatenate([clip for _, clip, _ in per_length])
    order = np.argsort(clip, kind="stable")
    start = np.concatenate([start for _, _, start in per_length])
    length = np.repeat(lengths, [len(clip) for _, clip, _ in per_length])
    return Spans(clip[order], start[order], length[order].astype(np.int64))


def _of_length(counts: Counts, length: int, how: Extraction) -> tuple[Counts, Counts]:
    """The clips, and the starts in them, of all runs of one length: [M] each."""
    fitting = np.flatnonzero(counts >= length)
    room = counts[fitting] - length
    if how.name == "uniform":
        distinct, which = np.unique(room, return_inverse=True)
        _refuse_too_many(how.sample * len(distinct), length)
        taken = [np.unique(np.linspace(0, last, how.sample, dtype=int)).astype(np.int64) for last in distinct.tolist()]
        per_distinct = np.array([len(positions) for positions in taken], dtype=np.int64)
        each, skipped = per_distinct[which], (np.cumsum(per_distinct) - per_distinct)[which]
        _refuse_too_many(int(each.sum()), length)
        places = np.concatenate([np.zeros(0, dtype=np.int64), *taken])
        return np.repeat(fitting, each), places[np.repeat(skipped, each) + _counted_up(each)]
    step = {"head": None, "chunk": length, "slide": how.stride}[how.name]
    each = np.ones_like(room) if step is None else room // step + 1
    _refuse_too_many(int(each.sum()), length)
    return np.repeat(fitting, each), _counted_up(each) * (step or 0)


def _counted_up(each: Counts) -> Counts:
    """0, 1, 2, … so far as each number of [N] says: [sum of them]."""
    return np.arange(int(each.sum()), dtype=np.int64) - np.repeat(np.cumsum(each) - each, each)


def _refuse_too_many(runs: int, length: int) -> None:
    if runs > _MOST_SPANS:
        raise BucketSettingsError(
            f"{runs:,} runs of {length} frames would be taken, more than {_MOST_SPANS:,}: use a larger frame_stride, "
            "a smaller frame_sample, or another frame_extraction"
        )
