"""What no epoch of a plan can train, however many there are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand_model import DemandModel
from kohya_bucket.planning.planner import EpochPlanner

__all__ = ["never_full", "never_trained"]


def never_full(planner: EpochPlanner) -> npt.NDArray[np.intp]:
    """Numbers of the buckets that hold images, of which no epoch asks as many trainings as fill a global batch."""
    most = _most_asked(planner.demand_model)
    return np.flatnonzero((most > 0) & (most < planner.full_batch))


def never_trained(planner: EpochPlanner) -> npt.NDArray[np.intp]:
    """Numbers of the images that no epoch trains: without a bucket, or left out with it every time."""
    ids = planner.demand_model.ids
    hopeless = np.zeros(planner.n_buckets + 1, dtype=np.bool_)
    hopeless[-1] = True  # id -1: no bucket
    if planner.options.leaves_out_small_buckets:
        hopeless[never_full(planner)] = True
    lost = hopeless[ids]
    return np.flatnonzero(lost if lost.ndim == 1 else lost.all(axis=1))


def _most_asked(model: DemandModel) -> npt.NDArray[np.int64]:
    """[K] trainings of each bucket in the epoch that asks most of it; where epochs never come round, no fewer."""
    period = model.period()
    if period is not None:
        # As in `moved_pairs`: images change from seed to seed, numbers do not.
        asked = [model.for_epoch(0, epoch).demand.per_bucket() for epoch in range(period)]
        most: npt.NDArray[np.int64] = np.stack(asked).max(axis=0)
        return most
    ids, times = model.ids if model.several_buckets else model.ids[:, None], model.most_times()
    placed = ids >= 0
    weights = np.broadcast_to(times[:, None], ids.shape)[placed]
    return np.bincount(ids[placed], weights=weights, minlength=model.n_buckets).astype(np.int64)
