"""Taking a part of each bucket so that every epoch takes another one and all come round equally often."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand import Demand
from kohya_bucket.planning.stream import Purpose, stream

__all__ = ["rotate_window", "take_in_rotation"]


def take_in_rotation(demand: Demand, want: npt.NDArray[np.int64], seed: int, epoch: int) -> npt.NDArray[np.intp]:
    """Rows of the demand, `want[k]` trainings of each bucket k.

    Each bucket's trainings stand in a circle whose order depends on the seed alone: all first trainings of its
    images, then all second ones, and so on. Epoch e takes the next `want` places after those of epoch e - 1,
    so while the demand stays the same, over any number of epochs two trainings are taken equally often or
    once apart. A bucket that is asked for more than it holds is gone round several times.

    Returns:
        [sum(want)] rows, bucket by bucket; empty buckets give none.
    """
    order = np.argsort(demand.bucket, kind="stable")
    rows_in = np.bincount(demand.bucket, minlength=demand.n_buckets)
    ends = np.cumsum(rows_in)
    times = demand.all_times()
    rng = stream(Purpose.ROTATION, seed)
    taken: list[npt.NDArray[np.intp]] = []
    for k in np.flatnonzero(rows_in):
        rows = order[ends[k] - rows_in[k] : ends[k]]
        rng.shuffle(rows)
        if want[k] < 1:
            continue
        circle = _round_by_round(rows, times[rows])
        if len(circle):
            taken.append(circle[rotate_window(len(circle), int(want[k]), epoch)])
    return np.concatenate(taken) if taken else np.zeros(0, dtype=np.intp)


def rotate_window(length: int, want: int, epoch: int) -> npt.NDArray[np.intp]:
    """[want] places of a circle of `length` that epoch number `epoch` takes, `want` in every epoch."""
    return (epoch * want % length + np.arange(want)) % length


def _round_by_round(rows: npt.NDArray[np.intp], times: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    most = int(times.max()) if len(times) else 0
    if most <= 1:
        return rows[times > 0]
    return np.concatenate([rows[times > j] for j in range(most)])
