"""sd-scripts' loaders: `DataLoader(group, batch_size=1, shuffle=True, collate_fn=collator)` in every trainer."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.sampler import PlanSampler, call_arguments, draws_by_itself, with_plan
from kohya_bucket.adapter.seams import Door
from kohya_bucket.planning import ORDERS, REMAINDERS
from kohya_bucket.sdscripts.caching.latents import forget_files
from kohya_bucket.sdscripts.caching.shards import shard_numbers
from kohya_bucket.sdscripts.caching.text import end_before_training, forget_texts
from kohya_bucket.sdscripts.datasets.records import compact
from kohya_bucket.sdscripts.datasets.tables import BatchTable
from kohya_bucket.sdscripts.loss_weights import say_what_is_not_weighed
from kohya_bucket.sdscripts.objects import HeldDataset

__all__ = ["planned_arguments", "refuse_empty"]


def refuse_empty(group: Any) -> None:
    """End a run whose training group holds no image: sd-scripts says so, and ends as if all had gone well."""
    datasets = list(getattr(group, "datasets", ()))
    tables = [table for one in datasets if isinstance(table := getattr(one, "buckets_indices", None), BatchTable)]
    training = all(getattr(one, "is_training_dataset", True) for one in datasets)
    if training and tables and len(tables) == len(datasets) and not any(len(table.images.keys) for table in tables):
        raise SystemExit(
            "kohya_bucket: no image is left to train: the folders are empty, or every image was left out for the "
            "reason "
            "above; `kohya-bucket plan` shows the same without training"
        )


def planned_arguments(
    door: Door, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a `DataLoader` call with the plan; None where the call is not a trainer's.

    A trainer's call has a dataset group, one item a batch, no sampler of its own, and a collator that knows the epoch.
    """
    arguments = call_arguments(signature, args, kwargs)
    group: Any = arguments.get("dataset")
    collator: Any = arguments.get("collate_fn")
    if not isinstance(group, door.owners.named("DatasetGroup")) or not draws_by_itself(arguments):
        return None
    if not (hasattr(collator, "current_epoch") and hasattr(collator, "current_step")):
        return None
    datasets: list[HeldDataset] = group.datasets
    tables = [table for dataset in datasets if isinstance(table := dataset.buckets_indices, BatchTable)]
    if not tables or len(tables) < len(datasets):
        return None
    end_before_training()
    training = bool(arguments.get("shuffle", False))
    counter, options = collator.current_epoch, tables[0].options
    if not training and REMAINDERS[options.remainder].leaves_out:
        # Its order is the same each time: the same images would never be validated.
        options = replace(options, remainder="keep")
    images = [table.images for table in tables]
    by_shards = ORDERS[options.order].uses_shards
    shards = shard_numbers(datasets, images, options.open_shards) if by_shards else None
    sampler = PlanSampler(
        GroupPlanner(images, options, shards),
        int(datasets[0].seed),
        counter if training else None,
        clock=None if training else counter,
        current_step=collator.current_step,
    )
    if training:
        door.resume.attach(sampler)
        say_what_is_not_weighed(sampler)
    compact(group)
    forget_files()  # trainers make their loaders when all is cached
    forget_texts()
    return with_plan(arguments, sampler, door.in_worker)
