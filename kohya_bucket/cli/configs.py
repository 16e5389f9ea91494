"""Dataset configs on a command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kohya_bucket.errors import ConfigError

if TYPE_CHECKING:
    from kohya_bucket.cli.options import RuleArguments
    from kohya_bucket.trainers.door.face import Trainer


def asked_trainer(command: str, context: typer.Context, config: Path | None, options: Iterable[str]) -> Trainer:
    """Whose config a file is. `ConfigError` for a command that does not take it, or options that it settles itself."""
    from kohya_bucket.cli.options import refuse_beside
    from kohya_bucket.trainers.door.registry import trainer_for

    trainer = trainer_for(command, config)
    if not trainer.takes_any:
        settled = [*options, *(["arch"] if not trainer.takes_arch else [])]
        refuse_beside(context, f"{config} is a config of {trainer.name}, which says all of that itself", settled)
    return trainer


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
    if config is None and len(named) == 1 and is_settings(Path(named[0])):
        config = Path(named.pop())
    if config is not None and buckets is None and _holds_buckets(config):
        config, buckets = None, config
    elif config is None and buckets is not None and _holds_buckets(buckets) is False:
        config, buckets = buckets, None
    return config, replace(options, bucket_config=buckets), named


def is_settings(path: Path) -> bool:
    """Whether it is a config by its name, and no table of sizes by what it holds."""
    from kohya_bucket.trainers.door.config_source import content_of

    if not path.is_file() or path.suffix.lower() != ".json":
        return path.is_file() and path.suffix.lower() in (".toml", ".yaml", ".yml")
    data = content_of(path)
    pairs = isinstance(data, dict) and all(isinstance(one, list) and len(one) == 2 for one in data.values())
    return not (isinstance(data, list) or (pairs and data))


def _holds_buckets(path: Path) -> bool | None:
    """Whether a file holds a bucket set (True) or a dataset config (False); None where it is neither."""
    from kohya_bucket.trainers.door.config_source import content_of

    data = content_of(path)
    if not isinstance(data, dict) or not {"buckets", "datasets"} & data.keys():
        return None
    return "datasets" not in data
