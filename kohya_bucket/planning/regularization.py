"""Regularization images in rotation: all of a set are used equally often, not always its first ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.stream import Purpose, stream

__all__ = ["regularization_times"]


def regularization_times(n: int, used_before: int, uses: int, seed: int) -> npt.NDArray[np.int64]:
    """[n] times that each of n regularization images is trained in an epoch.

    The images stand in a circle in an order that depends on the seed alone, and each epoch goes on where the
    last one stopped. So over any number of epochs in a row, the counts of two images differ by at most one.
    (sd-scripts trains the first `uses` images of the list in every epoch: its issue #2096.)

    Args:
        n: images in the set.
        used_before: uses in all epochs before this one together.
        uses: uses in this epoch, normally as many as there are trainings of other images.
    """
    times = np.full(n, uses // n if n else 0, dtype=np.int64)
    if n == 0 or uses == 0:
        return times
    circle = np.arange(n, dtype=np.int64)
    stream(Purpose.REGULARIZATION, seed).shuffle(circle)
    start = used_before % n
    times[circle[(start + np.arange(uses % n)) % n]] += 1
    return times
