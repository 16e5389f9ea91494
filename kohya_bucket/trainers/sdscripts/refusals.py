"""Why a training is refused before its first step, and what it is told it does not get."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import pip_install
from kohya_bucket.texts import parse_toml, read_text
from kohya_bucket.trainers.door.code import text_of
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import refuse_unmatched
from kohya_bucket.trainers.door.ranks import end_run, exit_with_message, warn_once
from kohya_bucket.trainers.door.sampler import PlanSampler
from kohya_bucket.trainers.sdscripts.objects import HeldDataset
from kohya_bucket.trainers.sdscripts.resuming import OPTIONS
from kohya_bucket.trainers.sdscripts.tables import BatchTable

logger = logging.getLogger("kohya_bucket")

# Images weigh the same on any number of GPUs through the batch's `loss_weights`; not every trainer reads them.
LOSS_WEIGHTS = "loss_weights"


def say_what_is_not_weighed(sampler: PlanSampler) -> None:
    """Warn where ranks of a step train unequal numbers of images and the trainer takes the mean of each rank's."""
    unequal = sampler.plan.unequal_steps
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
    return any(LOSS_WEIGHTS in text_of(file) for file in trainers)


def refuse_empty(group: Any) -> None:
    """End a run whose training group holds no image: sd-scripts says so, and ends as if all had gone well.

    Or none with a focus, where one is set.
    """
    datasets = list(getattr(group, "datasets", ()))
    tables = [table for one in datasets if isinstance(table := getattr(one, "buckets_indices", None), BatchTable)]
    training = all(getattr(one, "is_training_dataset", True) for one in datasets)
    if training and tables and len(tables) == len(datasets) and not any(len(table.images.keys) for table in tables):
        end_run(
            "no image is left to train: the folders are empty, or every image was left out for the reason above; "
            "`kohya-bucket plan` shows the same without training"
        )
    if training and tables:
        with exit_with_message():
            refuse_unmatched(tables[0].options, [table.images.focus for table in tables])


def say_what_is_in_no_store(datasets: Sequence[HeldDataset], options: AdapterOptions) -> None:
    """Name the store that is asked for and that this run, whose caches are all made, does not have."""
    if options.latent_cache != "shards":
        return
    from kohya_bucket.trainers.sdscripts.caching.shards import is_in_store

    if not all(map(is_in_store, datasets)):
        warn_once(
            f"{_SHARDS} is set, but this run caches no latents on disk: add --cache_latents and --cache_latents_to_disk"
        )


_SHARDS = "[kohya_bucket] latent_cache = 'shards'"


def refuse_what_needs(unknown: Mapping[str, str], options: AdapterOptions) -> None:
    """Refuse options and arguments that a subject must be known for, or a package installed.

    Raises:
        ConfigError: with what is asked for, and what is not known.
    """
    on_command_line = given_options(sys.argv[1:])
    needs: dict[str, list[str]] = {"caching": []}
    if options.latent_cache == "shards":
        needs["caching"].append(_SHARDS)
    if options.several_sizes:
        several = [name for name in ("cache_latents", "cache_latents_to_disk") if name in on_command_line]
        needs["caching"].extend(f"--{name} with several sizes for an image" for name in several)
    if options.focus:
        needs["caching"].append("[kohya_bucket] focus")
    needs["resuming"] = [f"--{name}" for name in ("resume", *OPTIONS) if name in on_command_line]
    for subject, asked in needs.items():
        if subject in unknown and asked:
            raise ConfigError(
                f"{asked[0]} needs a part of sd-scripts that differs from every known version: "
                f"{unknown[subject]}. Leave it out, or update kohya-bucket"
            )
    if options.latent_cache == "shards" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"{_SHARDS} needs pyarrow, which is not installed here: {pip_install('parquet')}, or leave it out"
        )


def given_options(arguments: Sequence[str]) -> set[str]:
    """Names of the options on a trainer's command line, and in the file that its `--config_file` names.

    A switch that is off in that file counts as not given.
    """
    names = {argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--")}
    for here, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if here.startswith("--config_file"):
            names |= _of_file(here.partition("=")[2] or after)
    return names


def _of_file(name: str) -> set[str]:
    path = Path(name if name.endswith(".toml") else name + ".toml")
    from kohya_bucket.trainers.sdscripts.config.run_file import without_headings

    try:
        table = parse_toml(read_text(path))
    except (OSError, ValueError):
        return set()  # the trainer says what is wrong with it
    return {key for key, value in without_headings(table).items() if value not in (None, False, "")}
