"""sd-scripts' loaders, `DataLoader(group, batch_size=1, …)` in every trainer, and the batch at a place of the plan."""

from __future__ import annotations

import bisect
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.planning import ORDERS
from kohya_bucket.trainers.door.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.sampler import PlanSampler, arguments_over, with_plan
from kohya_bucket.trainers.sdscripts.caching import loaded
from kohya_bucket.trainers.sdscripts.caching.extra_sizes import at_planned_size
from kohya_bucket.trainers.sdscripts.objects import Group, HeldDataset, Subset, inner_of
from kohya_bucket.trainers.sdscripts.refusals import LOSS_WEIGHTS, say_what_is_in_no_store, say_what_is_not_weighed
from kohya_bucket.trainers.sdscripts.tables import BatchTable, compact


def note_epoch(dataset: HeldDataset, epoch: int) -> None:
    """Note the epoch. The order of an epoch follows from its number, so nothing is shuffled here."""
    dataset.current_epoch = epoch
    inner_of(dataset).current_epoch = epoch


def planned_item(group: Group, index: PlannedBatch) -> Any:
    """The batch that `index` describes, whatever epoch and step the dataset believes it is in."""
    dataset: HeldDataset = group.datasets[index.dataset]
    note_epoch(dataset, index.epoch)
    owner = inner_of(dataset)
    if index.global_step is not None:
        owner.current_step = index.global_step

    def make(index: PlannedBatch) -> Any:
        keys = owner.bucket_manager.buckets[index]
        with own_random(index.seed), at_planned_size(dataset, index):
            batch = drop_unwanted_masks(dataset[index], keys, owner.image_to_subset)
        return weighed(batch, index.loss_scale)

    table = dataset.buckets_indices
    return batch_of_the_readable(make, index, table.images, table.options.on_bad_image)


def numbered_item(group: Group, number: int) -> Any:
    """The batch that stands at a number, for code that walks a group without a loader's sampler.

    Raises:
        ConfigError: a tool of sd-scripts is caching, which knows one size for each image.
    """
    number = range(len(group))[number]
    k = bisect.bisect_right(group.cumulative_sizes, number)
    dataset = group.datasets[k]
    if getattr(dataset, "caching_mode", None) is not None:
        raise ConfigError(
            "sd-scripts' caching tools cache each image at one size: use the trainer's own --cache_latents, or leave "
            "resolutions and remainder = 'merge' or 'catch_all' out"
        )
    batch: PlannedBatch = dataset.buckets_indices[number - (group.cumulative_sizes[k - 1] if k else 0)].bucket_index
    return planned_item(group, replace(batch, dataset=k))


@contextmanager
def own_random(seed: int) -> Iterator[None]:
    """Draw flips, crops and caption shuffles from `seed`, and leave the process's `random` as it was.

    Batches then differ from each other, and do not depend on which worker loads them, on a resume, or on what is logged
    meanwhile: rich before 15, by which sd-scripts writes its log, draws for the styles of a line.
    """
    style: Any = sys.modules.get("rich.style")
    if hasattr(style, "randint"):
        style.randint = random.SystemRandom().randint
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def weighed(batch: dict[str, object], scale: float) -> dict[str, object]:
    """The batch with its loss multiplied by `scale`: see `EpochPlan.loss_scale`."""
    weights = batch[LOSS_WEIGHTS]
    return batch if scale == 1 else batch | {LOSS_WEIGHTS: weights * scale}  # type: ignore[operator]  # a tensor


# Alpha masks in a batch: only of images whose subset asks for them.
#
# Cached latents keep the mask of a run that wanted it, and are shared by datasets of which one may want it. sd-scripts
# since 0.10 trains with every mask that it finds in a cache.


def drop_unwanted_masks(batch: Any, keys: Sequence[str], subset_of: Mapping[str, Subset]) -> Any:
    """The batch of these images, in this order, without the masks that no subset asks for.

    An image without a mask beside others with one counts whole, as in sd-scripts: its mask is all ones.
    """
    masks = batch.get("alpha_masks") if isinstance(batch, dict) else None
    if masks is None:
        return batch
    wanted = [bool(subset_of[key].alpha_mask) for key in keys]
    if all(wanted):
        return batch
    if any(wanted):
        masks = masks.clone()
        masks[[i for i, yes in enumerate(wanted) if not yes]] = 1
    return batch | {"alpha_masks": masks if any(wanted) else None}


def planned_arguments(
    door: TrainerDoor, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """The arguments of a `DataLoader` call with the plan; None where the call is not a trainer's.

    A trainer's call has a dataset group, one item a batch, no sampler of its own, and a collator that knows the epoch.
    """
    arguments = arguments_over(door.owners.named("DatasetGroup"), signature, args, kwargs)
    group: Any = arguments.get("dataset")
    collator: Any = arguments.get("collate_fn")
    if group is None or not (hasattr(collator, "current_epoch") and hasattr(collator, "current_step")):
        return None
    datasets: list[HeldDataset] = group.datasets
    tables = [table for dataset in datasets if isinstance(table := dataset.buckets_indices, BatchTable)]
    if not tables or len(tables) < len(datasets):
        return None
    if text := loaded("text"):
        text.ahead.end_before_training()
    say_what_is_in_no_store(datasets, tables[0].options)
    training = bool(arguments.get("shuffle", False))
    options = tables[0].options if training else tables[0].options.for_validation()
    images = [table.images for table in tables]
    shards = None
    if ORDERS[options.order].uses_shards:
        from kohya_bucket.trainers.sdscripts.caching.shards import shard_numbers

        shards = shard_numbers(datasets, images, options.open_shards)
    planner = GroupPlanner(images, options, shards)
    sampler = PlanSampler.told_by(collator, planner, int(datasets[0].seed), training=training)
    if training:
        door.resume.attach(sampler)
        say_what_is_not_weighed(sampler)
    compact(group)
    if session := loaded("session"):
        session.forget_shared()  # trainers make their loaders when all is cached
    return with_plan(arguments, sampler, door.in_worker)
