"""`plan_epoch`: from bucket numbers to `[step][rank] -> indices`. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt

from kohya_bucket.planning.keywords import PlanKeywords, known_options
from kohya_bucket.planning.plan import EpochPlan
from kohya_bucket.planning.planner import Done, EpochPlanner

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["plan_epoch"]


def plan_epoch(
    bucket_ids: npt.ArrayLike,
    batch_size: npt.ArrayLike | None = None,
    *,
    world_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    done: Sequence[Done] = (),
    **options: Unpack[PlanKeywords],
) -> EpochPlan:
    """Plan one epoch for all ranks.

    Equal arguments give equal plans, on every rank, machine, Python and numpy. Global batches of one bucket are
    planned first and sliced by rank afterwards: with `batch_size * world_size` kept, the images of each step are
    the same for any number of ranks.

    Args:
        bucket_ids: [N] bucket number of each image, -1 without one; or [N, R] with one column per resolution.
        batch_size: images of one rank in one step: a number, or [K] per bucket.
        world_size: number of ranks.
        seed: any integer.
        epoch: 0 or more.
        done: what of the epoch has been trained already, as (global batch, steps) in order. The plan then holds
            the rest: with the same global batch the very steps that would have followed, on any number of ranks;
            with another one the images that are left, planned anew. A global batch is a number or [K]. With
            same_shape="cost", (global batch, steps, ranks), and another number of ranks is planned anew too.
        options: see `PlanOptions`.

    Raises:
        PlanError: a value outside of its range, or an option without what it needs.
        TypeError: an option that does not exist, with the nearest one.
    """
    planner = EpochPlanner(bucket_ids, batch_size, world_size=world_size, **known_options(plan_epoch, options))
    return planner.plan(seed, epoch, done)
