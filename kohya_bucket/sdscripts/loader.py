"""sd-scripts' loaders: `DataLoader(group, batch_size=1, shuffle=True, collate_fn=collator)` in every trainer."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.sampler import PlanSampler, call_arguments, draws_by_itself, with_plan
from kohya_bucket.adapter.seams import Door, Owners
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import pip_install
from kohya_bucket.planning import ORDERS, REMAINDERS
from kohya_bucket.sdscripts.batches import say_what_is_not_weighed
from kohya_bucket.sdscripts.caching.session import forget_shared
from kohya_bucket.sdscripts.caching.shards import shard_numbers
from kohya_bucket.sdscripts.caching.text import end_before_training
from kohya_bucket.sdscripts.objects import HeldDataset
from kohya_bucket.sdscripts.resuming import OPTIONS
from kohya_bucket.sdscripts.tables import BatchTable, compact
from kohya_bucket.texts import parse_toml, read_text


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
    forget_shared()  # trainers make their loaders when all is cached
    return with_plan(arguments, sampler, door.in_worker)


# What needs a part of sd-scripts that looks unknown, and is refused before it costs a night.


# by option that may be "shards": the subject and the seam that it stands on, and what is cached
_SHARDS = {
    "latent_cache": ("caching", "BaseDataset.new_cache_latents", "latents"),
    "text_cache": ("text-caching", "BaseDataset.new_cache_text_encoder_outputs", "text-encoder outputs"),
}


def refuse_what_needs(unknown: Mapping[str, Any], options: AdapterOptions, owners: Owners) -> None:
    """Refuse options and arguments that a subject must be known for, or a package installed.

    Args:
        unknown: {subject: `Unknown`} of what is left to sd-scripts.
        owners: what it defines.
        options: the `[kohya_bucket]` table.

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
                f"{'; '.join(unknown[subject].problems)}. Leave it out, or update kohya-bucket"
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
    flat = dict(table)
    for value in table.values():
        if isinstance(value, dict):
            flat |= value
    return {key for key, value in flat.items() if value not in (None, False, "")}
