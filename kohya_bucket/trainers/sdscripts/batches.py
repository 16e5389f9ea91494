"""sd-scripts' loaders, `DataLoader(group, batch_size=1, …)` in every trainer, and the batch at a place of the plan."""

from __future__ import annotations

import bisect
import importlib.util
import inspect
import itertools
import logging
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import pip_install
from kohya_bucket.planning import ORDERS, REMAINDERS
from kohya_bucket.texts import parse_toml, read_text
from kohya_bucket.trainers.door.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import refuse_unmatched
from kohya_bucket.trainers.door.ranks import exit_with_message, is_first_process, warn_once
from kohya_bucket.trainers.door.sampler import PlanSampler, arguments_over, with_plan
from kohya_bucket.trainers.door.seams import Owners
from kohya_bucket.trainers.sdscripts.caching.extra_sizes import at_planned_size
from kohya_bucket.trainers.sdscripts.caching.session import forget_shared
from kohya_bucket.trainers.sdscripts.caching.shards import is_in_store, shard_numbers
from kohya_bucket.trainers.sdscripts.caching.text import end_before_training, reads_store
from kohya_bucket.trainers.sdscripts.config.run_file import without_headings
from kohya_bucket.trainers.sdscripts.objects import Group, HeldDataset, Subset, inner_of
from kohya_bucket.trainers.sdscripts.resuming import OPTIONS
from kohya_bucket.trainers.sdscripts.tables import BatchTable, compact

logger = logging.getLogger("kohya_bucket")


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
    trainers = [file for file in here if file.parent == folder and file.is_file()]  # torch names one that is not there
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


def refuse_empty(group: Any) -> None:
    """End a run whose training group holds no image: sd-scripts says so, and ends as if all had gone well.

    Or none with a focus, where one is set.
    """
    datasets = list(getattr(group, "datasets", ()))
    tables = [table for one in datasets if isinstance(table := getattr(one, "buckets_indices", None), BatchTable)]
    training = all(getattr(one, "is_training_dataset", True) for one in datasets)
    if training and tables and len(tables) == len(datasets) and not any(len(table.images.keys) for table in tables):
        raise SystemExit(
            "kohya_bucket: no image is left to train: the folders are empty, or every image was left out for the "
            "reason above; `kohya-bucket plan` shows the same without training"
        )
    if training and tables:
        with exit_with_message():
            refuse_unmatched(tables[0].options, [table.images.focus for table in tables])


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
    end_before_training()
    _say_what_is_in_no_store(door.owners, datasets, tables[0].options)
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
    forget_shared()  # trainers make their loaders when all is cached
    return with_plan(arguments, sampler, door.in_worker)


def _say_what_is_in_no_store(owners: Owners, datasets: Sequence[HeldDataset], options: AdapterOptions) -> None:
    """Name the stores that are asked for and that this run, whose caches are all made, does not have."""
    texts = owners.named("TextEncoderOutputsCachingStrategy").get_strategy() if options.text_cache == "shards" else None
    there = {"latent_cache": all(map(is_in_store, datasets)), "text_cache": texts is not None and reads_store(texts)}
    for option, (_, _, what) in _SHARDS.items():
        if getattr(options, option) == "shards" and not there[option]:
            cache = "cache_latents" if option == "latent_cache" else "cache_text_encoder_outputs"
            warn_once(
                f"[kohya_bucket] {option} = 'shards' is set, but this run caches no {what} on disk, so there is no "
                f"store of them: add --{cache} and --{cache}_to_disk"
            )


# What needs a part of sd-scripts that looks unknown, and is refused before it costs a night:
# by option that may be "shards": the subject and the seam that it stands on, and what is cached
_SHARDS = {
    "latent_cache": ("caching", "BaseDataset.new_cache_latents", "latents"),
    "text_cache": ("text-caching", "BaseDataset.new_cache_text_encoder_outputs", "text-encoder outputs"),
}


def refuse_what_needs(unknown: Mapping[str, str], options: AdapterOptions, owners: Owners) -> None:
    """Refuse options and arguments that a subject must be known for, or a package installed.

    Raises:
        ConfigError: with what is asked for, and what is not known.
    """
    given = given_options(sys.argv[1:])
    shards = {
        f"[kohya_bucket] {option} = 'shards'": kind
        for option, kind in _SHARDS.items()
        if getattr(options, option) == "shards"
    }
    needs = {subject: [option] for option, (subject, _, _) in shards.items()}
    if options.several_sizes:
        several = [name for name in ("cache_latents", "cache_latents_to_disk") if name in given]
        needs.setdefault("caching", []).extend(f"--{name} with several sizes for an image" for name in several)
    if options.focus:
        needs.setdefault("caching", []).append("[kohya_bucket] focus")
    needs["resuming"] = [f"--{name}" for name in ("resume", *OPTIONS) if name in given]
    for subject, asked in needs.items():
        if subject in unknown and asked:
            raise ConfigError(
                f"{asked[0]} needs a part of sd-scripts that looks different from every known version: "
                f"{unknown[subject]}. Leave it out, or update kohya-bucket"
            )
    for option, (_, seam, what) in shards.items():
        if not owners.has(seam):
            raise ConfigError(
                f"{option} needs a sd-scripts that caches {what} by strategies (0.10 or newer), which this is not. "
                "Leave it out: this version's own cache is used"
            )
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                f"{option} needs pyarrow, which is not installed here: {pip_install('parquet')}, or leave it out"
            )


def given_options(arguments: Sequence[str]) -> set[str]:
    """Names of the options on a trainer's command line, and in the file that its `--config_file` names.

    A switch that is off in that file counts as not given.
    """
    given = {argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--")}
    for here, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if here.startswith("--config_file"):
            given |= _of_file(here.partition("=")[2] or after)
    return given


def _of_file(name: str) -> set[str]:
    path = Path(name if name.endswith(".toml") else name + ".toml")
    try:
        table = parse_toml(read_text(path))
    except (OSError, ValueError):
        return set()  # the trainer says what is wrong with it
    return {key for key, value in without_headings(table).items() if value not in (None, False, "")}
