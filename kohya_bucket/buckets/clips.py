"""Clips in buckets of width, height and frames: how many frames a clip has, which of them make an item, and where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.rule import BucketRule, check_rule
from kohya_bucket.buckets.sizes import IntArray, as_sizes, positive
from kohya_bucket.checks import one_of
from kohya_bucket.errors import BucketSettingsError

Counts = npt.NDArray[np.int64]


EXTRACTIONS = ("largest", "head", "chunk", "slide", "uniform", "full")
"""From the start: the longest listed length that fits (`largest`), each that fits (`head`), or as long as the grid and
`max_frames` allow (`full`). Of each length: one run after the other (`chunk`), one every `stride` frames (`slide`), or
`sample` of them spread evenly (`uniform`)."""


class ClipBuckets:
    """Buckets of width, height and frames.

    Args:
        picture: the rule that places a frame as an image.
        lengths: numbers of frames that may be trained; each is rounded down to the grid. Ignored by the
            extraction `full`.
        grid: the numbers of frames that the model takes.
        extraction: which runs of frames are taken of a clip, one of `EXTRACTIONS`.
        stride: frames from one run to the next for `slide`.
        sample: runs of each length for `uniform`.
        max_frames: the longest run for `full`; None for no limit.
        target_fps: the rate of the model, to which clips are brought by dropping frames; None leaves them as they are.
        by_time: frames are repeated too where the clip's rate is lower, so that a clip lasts as long as before.

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
        by_time: bool = False,
    ) -> None:
        check_rule(picture)
        self.picture, self.grid = picture, grid or FrameGrid()
        one_of("extraction", extraction, EXTRACTIONS, BucketSettingsError)
        positive(stride=stride, sample=sample, max_frames=1 if max_frames is None else max_frames)
        self.extraction = "head" if extraction == "uniform" and sample == 1 else extraction
        self.stride, self.sample, self.max_frames = stride, sample, max_frames
        self.lengths = () if extraction == "full" else self.grid.lengths(lengths)
        self.target_fps = None if target_fps is None else check_rate("target_fps", target_fps)
        self.by_time = by_time

    def place(
        self, sizes: npt.ArrayLike, frames: npt.ArrayLike, source_fps: npt.ArrayLike | None = None
    ) -> ClipPlacement:
        """Place N clips.

        Args:
            sizes: [N, 2] (width, height) of their frames; a side below 1 counts as unreadable.
            frames: [N] how many each has; below 1 counts as unreadable.
            source_fps: frames per second, of all or [N] of each; None converts none.

        Raises:
            BucketSettingsError: counts below 1, or a rate of 0.
        """
        array = as_sizes(sizes)
        counts = clip_counts(frames, len(array))
        picture = self.picture.place(array)
        counts = np.where(array.min(axis=1, initial=1) < 1, 0, counts)
        loaded = counts  # what runs are taken from: a trainer may stop loading before the end
        if source_fps is not None and self.target_fps is not None and self.by_time:
            rates = np.asarray(source_fps, dtype=np.float64)
            for rate in np.unique(rates).tolist():
                check_rate("source_fps", rate)
            seconds = counts / rates
            loaded = counts = np.ceil(seconds * self.target_fps - 1e-9).astype(np.int64)
        elif source_fps is not None and self.target_fps is not None:
            # Where musubi-tuner stops loading: for `head` at the longest length, whatever it has loaded till then.
            end = self.lengths[-1] if self.extraction == "head" else None
            loaded = frames_at_rate(counts, source_fps, self.target_fps, end)
            counts = frames_at_rate(counts, source_fps, self.target_fps)
        spans = take_spans(np.where(picture.placed, loaded, 0), self)
        buckets, index = used_buckets(picture, spans)
        reasons = picture.reasons.copy()
        reasons[picture.placed & (np.bincount(spans.clip, minlength=len(array)) < 1)] = Reason.TOO_SHORT
        reasons[counts < 1] = Reason.UNREADABLE
        return ClipPlacement(picture, counts, spans, buckets, index, reasons)


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
        raise BucketSettingsError(f"a clip of {int(array.max()):,} frames, but a clip can have at most {MOST_FRAMES:,}")
    return np.maximum(array.astype(np.int64), 0)


@dataclass(frozen=True, repr=False)
class ClipPlacement:
    """N clips, of which M items are trained in K buckets.

    Attributes:
        picture: [N] where the frames go: size, resize and crop, as for an image.
        frames: [N] of each clip, at the rate it is trained at; 0 where it could not be read.
        spans: the M items: which clip, from which frame, how many.
        buckets: [K, 3] int32 width, height, frames of the buckets in use, sorted.
        bucket_index: [M] int32 positions in `buckets`.
        reasons: [N] uint8 values of `Reason`; `PLACED` where the clip has an item.
    """

    picture: Placement
    frames: npt.NDArray[np.int64]
    spans: Spans
    buckets: IntArray
    bucket_index: IntArray
    reasons: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def placed(self) -> npt.NDArray[np.bool_]:
        """[N] bool: at least one item is trained of the clip."""
        return np.asarray(self.reasons == Reason.PLACED)

    @property
    def items_per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] items in each bucket."""
        return np.bincount(self.bucket_index, minlength=len(self.buckets)).astype(np.int64)

    @cached_property
    def kept(self) -> npt.NDArray[np.int64]:
        """[N] frames that at least one item has; the others of `frames` are dropped."""
        return self.spans.covered(len(self))

    def reason(self, i: int) -> Reason:
        """Why clip `i` is not trained (`Reason.PLACED` if it is)."""
        return Reason(int(self.reasons[i]))

    def __repr__(self) -> str:
        n, items = int(self.placed.sum()), len(self.spans)
        return f"<{type(self).__name__} n={len(self)} placed={n} items={items} n_buckets={len(self.buckets)}>"


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
        # All clips on one line, each with room for the longest; then each run adds what lies behind all before it.
        room = int((self.start + self.length).max(initial=0)) + 1
        order = np.lexsort((self.start, self.clip))
        starts = self.clip[order] * room + self.start[order]
        ends = starts + self.length[order]
        covered_to = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
        added = np.maximum(ends - np.maximum(starts, covered_to), 0)
        return np.bincount(self.clip[order], weights=added, minlength=clips).astype(np.int64)


def take_spans(frames: Counts, how: ClipBuckets) -> Spans:
    """The runs that are trained of N clips of [N] frames, at the rate they are trained at; 0 where unreadable.

    Raises:
        BucketSettingsError: more than 100 million runs.
    """
    lengths = np.array(how.lengths, dtype=np.int64)
    if how.extraction in ("full", "largest"):
        if how.extraction == "full":
            each = how.grid.floor(frames if how.max_frames is None else np.minimum(frames, how.max_frames))
        else:
            each = np.append(0, lengths)[np.searchsorted(lengths, frames, side="right")]
        clip = np.flatnonzero(each)
        return Spans(clip, np.zeros_like(clip), each[clip])
    clips, starts = zip(*(_of_length(frames, length, how) for length in how.lengths), strict=True)
    clip = np.concatenate(clips)
    order = np.argsort(clip, kind="stable")
    length = np.repeat(lengths, [len(some) for some in clips])
    return Spans(clip[order], np.concatenate(starts)[order], length[order])


def _of_length(counts: Counts, length: int, how: ClipBuckets) -> tuple[Counts, Counts]:
    """The clips, and the starts in them, of all runs of one length: [M] each."""
    fitting = np.flatnonzero(counts >= length)
    room = counts[fitting] - length
    if how.extraction == "uniform":
        # Clips with equal room have equal starts, which are found once: [M] places, one kind of clip after another.
        distinct, which = np.unique(room, return_inverse=True)
        _refuse_too_many(how.sample * len(distinct), length)
        starts = [np.unique(np.linspace(0, last, how.sample, dtype=int)).astype(np.int64) for last in distinct.tolist()]
        per_distinct = np.array([len(positions) for positions in starts], dtype=np.int64)
        each, skipped = per_distinct[which], (np.cumsum(per_distinct) - per_distinct)[which]
        _refuse_too_many(int(each.sum()), length)
        places = np.concatenate([np.zeros(0, dtype=np.int64), *starts])
        return np.repeat(fitting, each), places[runs(each, skipped)]
    step = {"head": None, "chunk": length, "slide": how.stride}[how.extraction]
    each = np.ones_like(room) if step is None else room // step + 1
    _refuse_too_many(int(each.sum()), length)
    return np.repeat(fitting, each), runs(each) * (step or 0)


def _refuse_too_many(runs: int, length: int) -> None:
    if runs > _MOST_SPANS:
        raise BucketSettingsError(
            f"{runs:,} runs of {length} frames would be taken, more than {_MOST_SPANS:,}: use a larger stride, a "
            "smaller sample, or another extraction"
        )


@dataclass(frozen=True)
class FrameGrid:
    """`stride * n + base` frames: 4n+1 for Wan and HunyuanVideo, 8n+1 for LTX-Video, 17n+5 for MiniMax-H3.

    Attributes:
        latents: how many stand for a stride, and how many for the base.

    Raises:
        BucketSettingsError: a stride or base below 1.
    """

    stride: int = 4
    base: int = 1
    latents: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if min(self.stride, self.base) < 1:
            raise BucketSettingsError(f"a grid of {self} frames: the stride and the base must be 1 or more")

    def __str__(self) -> str:
        return f"{self.stride}n+{self.base}"

    def floor(self, frames: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The largest number of the grid within each of `frames`, of the same shape; 0 where there is none."""
        array = np.asarray(frames, dtype=np.int64)
        return np.where(array < self.base, 0, (array - self.base) // self.stride * self.stride + self.base)

    def lengths(self, frames: Iterable[int]) -> tuple[int, ...]:
        """Lengths on the grid, ascending, each once, from the listed ones.

        Raises:
            BucketSettingsError: none is listed, or one is shorter than the grid's first.
        """
        listed = sorted({int(count) for count in frames})
        if not listed:
            raise BucketSettingsError("no number of frames is listed: name at least one, e.g. 1, 25, 45")
        if listed[0] < self.base:
            raise BucketSettingsError(f"{listed[0]} frames are listed, but the shortest clip of {self} has {self.base}")
        return tuple(dict.fromkeys(self.floor(listed).tolist()))

    def latent_frames(self, frames: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """How many latents stand for so many frames of the grid."""
        array = np.asarray(frames, dtype=np.int64)
        each, first = self.latents
        return np.where(array < self.base, 0, (array - self.base) // self.stride * each + first)


MOST_FRAMES = 10_000_000
"""Frames of one clip; at 30 frames per second these are 92 hours."""


def check_rate(name: str, rate: float) -> float:
    """A rate in frames per second.

    Raises:
        BucketSettingsError: it is 0, negative, infinite or no number.
    """
    if not (np.isfinite(rate) and rate > 0):
        raise BucketSettingsError(f"{name} is {rate}, but must be frames per second above 0")
    return float(rate)


def kept_frames(frames: int, source_fps: float, target_fps: float) -> tuple[Counts, Counts]:
    """Which of a clip's first frames are kept.

    Returns:
        [M] positions in the clip, and [M] the place that each takes at the target rate. The places are 0, 1, 2, …
        unless the target is faster than the source; then they have gaps.
    """
    step = check_rate("target_fps", target_fps) / check_rate("source_fps", source_fps)
    steps = np.full(frames, step)
    steps[:1] = 0.0
    places = np.cumsum(steps).astype(np.int64)
    kept = np.flatnonzero(np.diff(places, prepend=-1))
    return kept, places[kept]


def frames_at_rate(
    frames: npt.ArrayLike, source_fps: npt.ArrayLike, target_fps: float, end: int | None = None
) -> Counts:
    """How many frames N clips have at the target rate.

    Args:
        frames: [N] in the file.
        source_fps: the rate of all, or [N] of each.
        target_fps: the model's.
        end: loading stops at this place at the target rate; with a source slower than the target that is before so
            many frames are loaded.

    Raises:
        BucketSettingsError: a rate that is not above 0.
    """
    counts = np.asarray(frames, dtype=np.int64)
    rates = np.broadcast_to(np.asarray(source_fps, dtype=np.float64), counts.shape)
    out = np.zeros_like(counts)
    for rate in np.unique(rates).tolist():
        at_rate = rates == rate
        longest = int(counts[at_rate].max(initial=0))
        kept, places = kept_frames(longest, rate, target_fps)
        before_end = len(kept) if end is None else int(np.searchsorted(places, end))
        out[at_rate] = np.minimum(np.searchsorted(kept, counts[at_rate]), before_end)
    return out
