"""Dataset configs of sd-scripts, as commands take them beside images and rule options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import parse_json, parse_toml, read_text

if TYPE_CHECKING:
    from kohya_bucket.adapter.options import AdapterOptions
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.sdscripts.config import Config

__all__ = ["adapter_options", "is_bucket_set", "rules_of_config"]


def adapter_options(read: Config) -> AdapterOptions:
    """The `[kohya_bucket]` table of a config, over that of the environment."""
    from kohya_bucket.adapter.options import AdapterOptions, environment_table

    own = [] if read.table is None else [(str(read.path), read.table)]
    return AdapterOptions.from_tables(*environment_table(), *own)


def rules_of_config(path: Path, size: tuple[int, int]) -> list[tuple[str, BucketRule]]:
    """What each data set of a config is trained by, at each of its resolutions, and its name for the reader.

    The name says if the data set leaves out an image of this size.

    Raises:
        ConfigError: the config has a mistake other than missing images, or its rule depends on all images.
    """
    from kohya_bucket.adapter.dataset_keys import at_resolutions, rule_for
    from kohya_bucket.buckets.rules.registry import named_rule
    from kohya_bucket.sdscripts.config import Severity, read_config
    from kohya_bucket.sdscripts.config.skipping import skipped_images

    read = read_config(path, check_captions=False)
    wrong = [f for f in read.findings if f.severity is Severity.ERROR and f.code not in ("missing-folder", "no-images")]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0].text}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    adapter = adapter_options(read)
    if named_rule(adapter.rule).from_images:
        instead = f"`kohya-bucket plan {path} --images` shows them"
        raise ConfigError(f"{path}: rule {adapter.rule!r} depends on all images; {instead}")
    rules = []
    for number, dataset in enumerate(read.datasets, 1):
        skipped = skipped_images([str(path)], [size], dataset.config.skip_image_resolution).reasons.get(0)
        but = f", which does not train it ({skipped})" if skipped else ""
        for keys in at_resolutions(dataset.config.dataset_keys, adapter):
            width, height = keys.resolution
            rules.append((f"dataset {number} ({width}x{height}){but}", rule_for(keys, adapter)))
    return rules


def is_bucket_set(path: Path) -> bool:
    """Whether a TOML or JSON file holds a bucket set rather than a dataset config."""
    try:
        data = (parse_json if path.suffix.lower() == ".json" else parse_toml)(read_text(path))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "buckets" in data and "datasets" not in data
