"""keep: short batches are trained as they are. Nothing is lost, nothing is repeated."""

from __future__ import annotations

from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.policy import RemainderContext, RemainderPolicy

__all__ = ["KEEP"]


def _keep(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Change]]:  # noqa: ARG001
    """The demand as it is: ceil(n / global batch) batches of each bucket, as sd-scripts makes them.

    The short batch is spread over the ranks as evenly as can be; with fewer images than ranks, the ranks left
    over train an image of the same batch again (see `EpochPlan`).
    """
    return demand, []


KEEP = RemainderPolicy("keep", "trains them as a short batch", _keep)
