"""Options of a plan that cannot be combined, or that need another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.checks import one_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.resolutions import RESOLUTION_MODES

if TYPE_CHECKING:
    from kohya_bucket.planning.options import PlanOptions

__all__ = ["refuse_conflicts"]


def refuse_conflicts(options: PlanOptions) -> None:
    """Raises:
    PlanError: an option without what it needs, or with another that it does not go together with.
    """
    for option, policy in zip(("remainder", "small_buckets"), options.policies, strict=False):
        if policy.needs_sizes and options.sizes is None:
            raise PlanError(f"{option}={policy.name!r} needs bucket_sizes: {policy.needs_sizes}")
    if options.arrangement.heeds_shards and options.shards is None:
        raise PlanError(
            f"order={options.order!r} needs shards: the number of the shard that each image lies in; data sets of "
            "latents and of tar shards know it themselves"
        )
    if options.resolutions is not None:
        one_of("resolutions", options.resolutions, RESOLUTION_MODES)
    if options.resolution_weights is not None and not (options.mode and options.mode.by_weight):
        raise PlanError(
            f"resolution_weights is set, but resolutions is {options.resolutions!r}: weights belong to 'weighted'"
        )
    if options.by_cost and options.item_costs is None:
        raise PlanError("same_shape is 'cost' without bucket_tokens or bucket_sizes: the cost depends on them")
    if options.regularization is None and options.regularization_uses is not None:
        raise PlanError("regularization_uses is set without regularization: say which images they are")
    if options.by_cost and options.arrangement.heeds_shards:
        raise PlanError(
            f"same_shape is 'cost' and order is {options.order!r}: steps of several buckets are not made shard by "
            "shard; leave out one of them"
        )
