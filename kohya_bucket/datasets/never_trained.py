"""A warning where a plan leaves images out in every epoch."""

from __future__ import annotations

import warnings

import numpy as np

from kohya_bucket.planning import EpochPlanner, never_full, never_trained

__all__ = ["warn_of_never_trained"]


def warn_of_never_trained(planner: EpochPlanner) -> None:
    """Warn, in the name of whoever called the caller, of images whose buckets never fill a global batch."""
    if not planner.options.leaves_out_small_buckets or not len(small := never_full(planner)):
        return
    lost = np.setdiff1d(never_trained(planner), planner.demand_model.unplaced)
    warnings.warn(
        f"{len(lost):,} images are never trained: their buckets ({len(small)} of {planner.n_buckets}) fill no batch on "
        f"{planner.world_size} ranks; small_buckets='keep' trains them in short batches, never_trained names them",
        stacklevel=3,
    )
