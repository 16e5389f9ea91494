"""The loader seam: sd-scripts' `DataLoader` over a dataset group draws its batches from one plan.

The trainers build `DataLoader(group, batch_size=1, shuffle=True, collate_fn=collator)`, where an item is a
whole batch, and accelerate deals the items out to the ranks in turn. The sampler put in here yields a global
order in which every run of world-size items is one step of the plan: one bucket, one shape, a batch for each
rank.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.ranks import quiet_worker
from kohya_bucket.adapter.sampler import PlanSampler
from kohya_bucket.sdscripts.caching.latents import forget_files
from kohya_bucket.sdscripts.caching.text import forget_texts
from kohya_bucket.sdscripts.datasets.records import compact
from kohya_bucket.sdscripts.datasets.tables import BatchTable
from kohya_bucket.sdscripts.objects import HeldDataset
from kohya_bucket.sdscripts.seams import Door

__all__ = ["planned_arguments"]


def planned_arguments(
    door: Door, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a `DataLoader` call with our sampler put in; None where the call is not a trainer's.

    A trainer's call has a dataset group, one item a batch, no sampler of its own, and a collator that knows
    the epoch. Everything else is left alone.
    """
    try:
        arguments = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        return None
    arguments.pop("self")
    arguments.update(arguments.pop("kwargs", {}))
    group: Any = arguments.get("dataset")
    collator: Any = arguments.get("collate_fn")
    if not isinstance(group, door.owners.named("DatasetGroup")):
        return None
    if not (hasattr(collator, "current_epoch") and hasattr(collator, "current_step")):
        return None
    if arguments.get("batch_size", 1) != 1 or arguments.get("sampler") or arguments.get("batch_sampler"):
        return None
    datasets: list[HeldDataset] = group.datasets
    tables = [table for dataset in datasets if isinstance(table := dataset.buckets_indices, BatchTable)]
    if not tables or len(tables) < len(datasets):
        return None
    training = bool(arguments.pop("shuffle", False))
    counter, settings = collator.current_epoch, tables[0].settings
    if not training and settings.remainder == "drop":
        # Its order is the same each time: the same images would never be validated.
        settings = replace(settings, remainder="keep")
    planner = GroupPlanner([table.images for table in tables], settings)
    sampler = PlanSampler(
        planner,
        int(datasets[0].seed),
        counter if training else None,
        clock=None if training else counter,
        current_step=collator.current_step,
    )
    if training:
        door.resume.attach(sampler)
    compact(group)
    forget_files()  # trainers make their loaders when all is cached
    forget_texts()
    if arguments.get("generator") is None:
        # Every iterator draws a number. From the process's own generator, that would shift a resumed run's noise.
        arguments["generator"] = torch.Generator().manual_seed(sampler.seed % 2**63)
    if arguments.get("num_workers"):
        arguments["worker_init_fn"] = quiet_worker(arguments.get("worker_init_fn"), door.in_worker)
    return {**arguments, "sampler": sampler}
