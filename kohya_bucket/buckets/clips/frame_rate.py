"""Frames that are left when a clip is brought to another rate by dropping frames.

Source: kohya-ss/musubi-tuner, `load_video`. Its position is a sum of doubles, one for each frame, and so it is here: a
product would drop other frames. A clip that is slower than the target loses none, and none is made up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import BucketSettingsError

__all__ = ["MOST_FRAMES", "frames_at_rate", "kept_frames"]

MOST_FRAMES = 10_000_000
"""Frames of one clip; at 30 frames per second these are 92 hours."""

Counts = npt.NDArray[np.int64]


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
        BucketSettingsError: a rate that is none.
    """
    counts = np.asarray(frames, dtype=np.int64)
    rates = np.broadcast_to(np.asarray(source_fps, dtype=np.float64), counts.shape)
    out = np.zeros_like(counts)
    for rate in np.unique(rates).tolist():
        mine = rates == rate
        longest = int(counts[mine].max(initial=0))
        kept, places = kept_frames(longest, rate, target_fps)
        before_end = len(kept) if end is None else int(np.searchsorted(places, end))
        out[mine] = np.minimum(np.searchsorted(kept, counts[mine]), before_end)
    return out
