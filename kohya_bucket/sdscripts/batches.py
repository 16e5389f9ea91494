"""The batch at a place of the plan, made by sd-scripts' own data sets."""

from __future__ import annotations

import bisect
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.sampler import PlanSampler
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.caching.extra_sizes import at_planned_size
from kohya_bucket.sdscripts.objects import Group, HeldDataset, Subset, inner_of


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

    try:
        return make(index)
    except (MemoryError, ConfigError):
        raise
    except Exception as error:
        table = dataset.buckets_indices
        return batch_of_the_readable(make, index, table.images, error, table.options.on_bad_image)


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
    batch = dataset.buckets_indices[number - (group.cumulative_sizes[k - 1] if k else 0)].bucket_index
    return planned_item(group, PlannedBatch.make(int(batch), batch.epoch, k, batch.images, batch.seed, batch.bucket))


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


# Images weigh the same on any number of GPUs through the batch's `loss_weights`; not every trainer reads them.


_KEY = "loss_weights"

logger = logging.getLogger("kohya_bucket")


def weighed(batch: dict[str, object], scale: float) -> dict[str, object]:
    """The batch with its loss multiplied by `scale`: see `EpochPlan.loss_scale`."""
    weights = batch[_KEY]
    return batch if scale == 1 else batch | {_KEY: weights * scale}  # type: ignore[operator]  # a tensor


def say_what_is_not_weighed(sampler: PlanSampler) -> None:
    """Warn where ranks of a step train unequal numbers of images and the trainer takes the mean of each rank's."""
    unequal = sampler.unequal_steps
    if unequal and is_first_process() and not _trainer_uses_weights():
        logger.warning(
            "%d of %d steps leave GPUs with unequal numbers of images, and this trainer ignores loss_weights: "
            "images on the GPU with fewer count for more; remainder = 'pad' makes the numbers equal",
            unequal,
            len(sampler) // sampler.world_size,
        )


def _trainer_uses_weights() -> bool:
    """Whether the program that runs, or one that it is built on, reads the weights of its batches.

    sd-scripts' programs lie beside its `library`; `sdxl_train.py` and `fine_tune.py` do not read them.
    """
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if program is None:
        return True
    folder = Path(program).resolve().parent
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    here = {Path(file).resolve() for file in files if file and Path(file).suffix == ".py"}
    trainers = [file for file in here if file.parent == folder and file.is_file()]  # torch names one that is none
    return any(_KEY in file.read_text(encoding="utf-8", errors="replace") for file in trainers)


# Alpha masks in a batch: only of images whose subset asks for them.
#
# Cached latents keep the mask of a run that wanted it, and are shared by data sets of which one may want it. sd-scripts
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
