"""A trainer's `DataLoader` whose items are whole batches, drawing them from one plan.

accelerate deals the items out to the ranks in turn. The sampler put in here yields a global order in which every run
of world-size items is one step of the plan: one bucket, one shape, a batch for each rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from kohya_bucket.adapter.ranks import quiet_worker
from kohya_bucket.adapter.sampler import PlanSampler

__all__ = ["call_arguments", "draws_by_itself", "with_plan"]


def call_arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a `DataLoader` call by name; none at all for a call that is none."""
    try:
        arguments = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        return {}
    arguments.pop("self")
    more = arguments.pop("kwargs", {})
    return {**arguments, **more}


def draws_by_itself(arguments: dict[str, Any]) -> bool:
    """Whether a loader takes one item at a time, in an order that nobody gave it."""
    own = arguments.get("sampler") or arguments.get("batch_sampler")
    return not own and arguments.get("batch_size", 1) == 1


def with_plan(arguments: dict[str, Any], sampler: PlanSampler, in_worker: Callable[[], None]) -> dict[str, Any]:
    """The arguments of a loader that draws from a plan.

    Args:
        arguments: of the trainer's own call.
        sampler: yields the plan's batches.
        in_worker: opens the trainer's door in a worker process.
    """
    planned = {name: value for name, value in arguments.items() if name != "shuffle"} | {"sampler": sampler}
    if planned.get("generator") is None:
        # Every iterator draws a number. From the process's own generator, that would shift a resumed run's noise.
        planned["generator"] = torch.Generator().manual_seed(sampler.seed % 2**63)
    if planned.get("num_workers"):
        planned["worker_init_fn"] = quiet_worker(planned.get("worker_init_fn"), in_worker, sampler.bad_images)
    return planned
