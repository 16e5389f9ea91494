"""How long ranks wait for each other, predicted from what they train in each step.

A step ends when its slowest rank is done. With the cost of a rank's batch (of the plan's tokens, else pixels), all are
idle for `1 - mean / largest` of a step, and over an epoch for `1 - sum of means / sum of largest`. Images that are
trained again so that no rank is empty do not count as idle time; to compare plans that repeat with plans that wait,
count both as lost. Costs that are not in proportion to these, such as fixed ones per step, are not seen.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.plan import EpochPlan, item_costs, mixed_row, rank_costs

Costs = npt.NDArray[np.float64]


def idle_share(costs: npt.ArrayLike) -> float:
    """Share of all ranks' time that is spent waiting, from [S, W] costs of each step and rank; 0 if S is 0."""
    array = np.asarray(costs, dtype=np.float64)
    longest = float(array.max(axis=1).sum()) if array.size else 0.0
    return 1 - float(array.mean(axis=1).sum()) / longest if longest else 0.0


def lost_share(costs: npt.ArrayLike, trained: float) -> float:
    """Share of all ranks' time that is spent waiting or on repeats.

    Args:
        costs: [S, W] of each step and rank.
        trained: cost of the images that were to be trained, each as often as it was.
    """
    array = np.asarray(costs, dtype=np.float64)
    longest = float(array.max(axis=1).sum()) * array.shape[1] if array.size else 0.0
    return 1 - trained / longest if longest else 0.0


def trained_cost(plan: EpochPlan) -> float:
    """Cost of what a plan trains, without the repeats that fill ranks."""
    each, one = item_costs(plan), plan.bucket_of_step >= 0
    rows = mixed_row(plan.bucket_of_step[~one])
    mixed = plan.mixed.length[rows] * each[plan.mixed.bucket[rows]]
    return float((plan.length[one] * each[plan.bucket_of_step[one]]).sum()) + float(mixed.sum())


def lost_share_of(plan: EpochPlan) -> float:
    """Predicted share of all ranks' time that a plan spends waiting or on images that fill ranks."""
    return lost_share(rank_costs(plan), trained_cost(plan))


def dealt_costs(plan: EpochPlan, world_size: int, seed: int = 0) -> Costs:
    """[S, W] what ranks spend if the steps of a plan for one rank are shuffled and dealt out to W.

    Rank r then takes batch s*W + r in step s, as sd-scripts' loader and others do: ranks train different shapes in one
    step. At the end, batches from the start fill the last step.
    """
    costs = rank_costs(plan)[:, 0]
    order = np.arange(len(costs))
    np.random.RandomState(seed & 0xFFFFFFFF).shuffle(order)
    steps = -(-len(costs) // world_size)
    return np.resize(costs[order], steps * world_size).reshape(steps, world_size)


def idle_share_of(plan: EpochPlan) -> float:
    """Predicted idle share of a plan."""
    return idle_share(rank_costs(plan))
