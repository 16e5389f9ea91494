"""How long ranks wait for each other, predicted from the pixels they train in each step.

In data-parallel training a step ends when its slowest rank is done. With the pixels of a rank's batch as its
cost, the ranks of a step are idle for `1 - mean cost / largest cost` of it, and over an epoch for
`1 - sum of means / sum of largest`. What a model does not spend in proportion to pixels is not seen: attention
grows faster, fixed costs per step not at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.planning.options import RepeatsLike
from kohya_bucket.planning.plan import EpochPlan
from kohya_bucket.planning.planner import EpochPlanner

__all__ = ["idle_share", "idle_share_independent", "idle_share_of", "independent_costs", "rank_costs"]

Costs = npt.NDArray[np.float64]


def idle_share(costs: npt.ArrayLike) -> float:
    """Share of all ranks' time that is spent waiting, from [S, W] costs of each step and rank; 0 if S is 0."""
    array = np.asarray(costs, dtype=np.float64)
    longest = float(array.max(axis=1).sum()) if array.size else 0.0
    return 1 - float(array.mean(axis=1).sum()) / longest if longest else 0.0


def rank_costs(plan: EpochPlan, bucket_sizes: npt.ArrayLike | None = None) -> Costs:
    """[S, W] pixels that each rank of a plan trains in each step.

    Args:
        bucket_sizes: [K, 2]; by default those the plan was made with.
    """
    sizes = as_sizes(plan.bucket_sizes if bucket_sizes is None else bucket_sizes).astype(np.int64)
    pixels = (sizes[:, 0] * sizes[:, 1])[plan.bucket_of_step]
    images = np.stack([plan.rank_lengths(r) for r in range(plan.world_size)], axis=1)
    return (images * pixels[:, None]).astype(np.float64)


def idle_share_of(plan: EpochPlan, bucket_sizes: npt.ArrayLike | None = None) -> float:
    """Predicted idle share of a plan: all ranks train one shape, so only short batches leave ranks waiting."""
    return idle_share(rank_costs(plan, bucket_sizes))


def idle_share_independent(
    bucket_ids: npt.ArrayLike, batch_size: npt.ArrayLike | None, bucket_sizes: npt.ArrayLike, *, world_size: int,
    seed: int = 0, repeats: RepeatsLike | None = None,
) -> float:  # fmt: skip
    """Predicted idle share if every rank draws batches of its own; see `independent_costs`."""
    return idle_share(
        independent_costs(bucket_ids, batch_size, bucket_sizes, world_size=world_size, seed=seed, repeats=repeats)
    )


def independent_costs(
    bucket_ids: npt.ArrayLike, batch_size: npt.ArrayLike | None, bucket_sizes: npt.ArrayLike, *, world_size: int,
    seed: int = 0, repeats: RepeatsLike | None = None,
) -> Costs:  # fmt: skip
    """[S, W] pixels that each rank trains in each step if batches are handed out as sd-scripts' loader does.

    There, batches of `batch_size` are cut per bucket and shuffled, and rank r takes batch s*W + r in step s:
    ranks train different shapes in one step. At the end, batches from the start fill the last step.
    """
    planner = EpochPlanner(bucket_ids, batch_size, bucket_sizes=bucket_sizes, repeats=repeats)
    costs = rank_costs(planner.plan(seed))[:, 0]
    order = np.arange(len(costs))
    np.random.RandomState(seed & 0xFFFFFFFF).shuffle(order)
    steps = -(-len(costs) // world_size)
    return np.resize(costs[order], steps * world_size).reshape(steps, world_size)
