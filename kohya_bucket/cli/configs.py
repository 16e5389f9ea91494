"""Dataset configs on a command line, and for which trainer and version they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument
from kohya_bucket.reports.trainers import AI_TOOLKIT, SD_SCRIPTS, checkout_named, content_of, trainer_of

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.cli.options import RuleArguments
    from kohya_bucket.trainers.ai_toolkit.config import JobConfig
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.musubi.config import MusubiConfig
    from kohya_bucket.trainers.sdscripts.config import Config


SETTINGS = (".toml", ".json", ".yaml", ".yml")
"""How the names of configs end."""


def adapter_options(read: Config | MusubiConfig | JobConfig) -> AdapterOptions:
    """The `[kohya_bucket]` table of a config, over that of the environment; `ConfigError` with all mistakes in it."""
    from kohya_bucket.trainers.door.options import required

    try:
        return required(read.options, read.findings)
    except ConfigError as error:
        raise ConfigError(f"{read.path}: {error}" if read.path else str(error)) from error


Rules = list[tuple[str, "BucketRule", tuple[int, int]]]


def rules_of_config(path: Path, image: Path | None, size: tuple[int, int], orientation: int) -> Rules:
    """What each dataset of a config is trained by, at each of its resolutions: its name, the rule, and the size that
    an image counts as there.

    The name says if the dataset leaves out an image of this size. `ConfigError` for a mistake other than missing
    images, or a rule that depends on all images.

    Args:
        image: its file, where it is one.
        size, orientation: the image's, as it is stored.
    """
    from kohya_bucket.buckets.rules.registry import named_rule
    from kohya_bucket.trainers.door.dataset_keys import at_resolutions, rule_for
    from kohya_bucket.trainers.sdscripts.config import Severity, read_config
    from kohya_bucket.trainers.sdscripts.config.files import skipped_images

    if trainer_of(path) == AI_TOOLKIT:
        return _rules_of_job(path, image, size, orientation)
    read = read_config(path, check_captions=False)
    harmless = ("missing-folder", "no-images", "cache-conflict")
    wrong = [f for f in read.findings if f.severity is Severity.ERROR and f.code not in harmless]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0].text}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    adapter = adapter_options(read)
    if named_rule(adapter.rule).from_images:
        instead = f"`kohya-bucket plan {argument(path)} --images` shows them"
        raise ConfigError(f"{path}: rule {adapter.rule!r} depends on all images; {instead}")
    rules = []
    for number, dataset in enumerate(read.datasets, 1):
        skipped = skipped_images([str(path)], [size], dataset.config.skip_image_resolution).reasons.get(0)
        but = f", which does not train it ({skipped})" if skipped else ""
        for keys in at_resolutions(dataset.config.dataset_keys, adapter):
            width, height = keys.resolution
            rules.append((f"dataset {number} ({width}x{height}){but}", rule_for(keys, adapter), size))
    return rules


def _rules_of_job(path: Path, image: Path | None, size: tuple[int, int], orientation: int) -> Rules:
    import numpy as np

    from kohya_bucket.buckets.sizes import as_pair
    from kohya_bucket.trainers.ai_toolkit.config import read_job
    from kohya_bucket.trainers.ai_toolkit.plan import counted_sizes, listed_as, rule_of

    job = read_job(path)
    if not job.datasets:
        raise ConfigError(f"{path}: {next(iter(job.findings)).text}")
    sizes, turns = np.array([size], dtype=np.int32), np.array([orientation], dtype=np.uint8)
    found = []
    for keys in job.datasets:
        counted = as_pair(counted_sizes(keys, sizes, turns, listed_as(keys, image) if image else ())[0])
        if min(counted) < 1:
            raise ConfigError(f"{path}: {keys.place}: scale = {keys.scale} leaves no pixel of {size[0]}x{size[1]}")
        found.append((f"{keys.place} (for {job.arch})", rule_of(keys, job.step), counted))
    return found


def only_one(argument: Path | None, option: Path | None) -> Path | None:
    """A config that may be given as an argument or by `--config`, and not by both."""
    if argument is not None and option is not None:
        raise ConfigError(f"{argument} and --config {option}: give one config")
    return argument or option


def given_config(
    config: Path | None, options: RuleArguments, images: Sequence[str] = ()
) -> tuple[Path | None, RuleArguments, list[str]]:
    """(config, rule options, images): each file where it belongs by what it holds, wherever it was given.

    Args:
        config: of `--config`; a bucket set in its place counts as `--bucket-config`.
        options: a dataset config in place of their bucket set counts as `--config`.
        images: a single TOML or JSON file in their place counts as `--config` too.
    """
    named, buckets = list(images), options.bucket_config
    if config is None and len(named) == 1 and _is_settings(Path(named[0])):
        config = Path(named.pop())
    if config is not None and buckets is None and _holds_buckets(config):
        config, buckets = None, config
    elif config is None and buckets is not None and _holds_buckets(buckets) is False:
        config, buckets = buckets, None
    return config, replace(options, bucket_config=buckets), named


def _is_settings(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SETTINGS


def refuse_others(path: Path, command: str) -> None:
    """Raise `ConfigError` for a config of another trainer, for a command that knows sd-scripts' only."""
    if (trainer := trainer_of(path)) != SD_SCRIPTS:
        others = "plan, analyze, simulate and doctor take this one"
        raise ConfigError(f"{path} is a config of {trainer}, and {command} takes those of sd-scripts; {others}")


def musubi_config(path: Path, arch: str | None) -> MusubiConfig:
    """A config of musubi-tuner, for the model that `--arch` names. `ConfigError` for one with mistakes."""
    from kohya_bucket.trainers.door.findings import Severity
    from kohya_bucket.trainers.musubi.architectures import architecture_named
    from kohya_bucket.trainers.musubi.config import read_config

    read = read_config(path, architecture_named(arch))
    if wrong := read.findings.of(Severity.ERROR):
        raise ConfigError(f"{path}: {wrong[0].text}")
    return read


def _holds_buckets(path: Path) -> bool | None:
    """Whether a file holds a bucket set (True) or a dataset config (False); None where it is neither."""
    data = content_of(path)
    if not isinstance(data, dict) or not {"buckets", "datasets"} & data.keys():
        return None
    return "datasets" not in data


Arch = Annotated[
    str | None, typer.Option(help="What is trained: sd, sdxl, flux, …, or flux_train.py; a GUI's preset tells.")
]


def version_for(given: str) -> str:
    """The version of sd-scripts, as `Family.read_by` takes it.

    `given` is a version, or a folder with a checkout; "" for the checkout that the command is run in, if there is one.
    """
    from kohya_bucket.trainers.sdscripts.checkout import npz_version
    from kohya_bucket.trainers.sdscripts.families import is_version

    if is_version(given):
        return given
    found = checkout_named("--for", given)
    return npz_version(found) if found else ""
