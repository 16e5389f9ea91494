"""Which options of the `[kohya_bucket]` table musubi-tuner's trainers can have."""

from __future__ import annotations

from dataclasses import fields

from kohya_bucket.adapter.options import AdapterOptions, environment_table
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.config import MusubiConfig

__all__ = ["check_options", "options_of"]

_MEANT_HERE = {"remainder", "small_buckets", "order", "run_length", "same_shape", "on_bad_image"} | {
    "max_pixels", "max_tokens", "max_cost", "model", "cost"
}  # fmt: skip


def check_options(options: AdapterOptions) -> None:
    """Refuse options that caches cannot have.

    Raises:
        ConfigError: with what to change.
    """
    usual = AdapterOptions()
    for field in fields(options):
        if field.name not in _MEANT_HERE and getattr(options, field.name) != getattr(usual, field.name):
            several = "give each resolution [[datasets]] and a cache_directory of its own"
            remedy = several if field.name == "resolutions" else "leave it out"
            raise ConfigError(
                f"[kohya_bucket] {field.name} is set, but musubi-tuner trains from caches that were made without "
                f"it: {remedy}; {', '.join(sorted(_MEANT_HERE))} can be set"
            )
    if options.moves_images:
        raise ConfigError(
            f"[kohya_bucket] remainder is {options.remainder!r}, which trains images at other sizes, but caches "
            "have one size each: use 'keep', 'pad' or 'drop'"
        )


def options_of(read: MusubiConfig) -> AdapterOptions:
    """The table of a config, over that of the environment.

    Raises:
        ConfigError: an unknown key, a value that is not allowed, or an option that caches cannot have.
    """
    own = [] if read.table is None else [(str(read.path), read.table)]
    options = AdapterOptions.from_tables(*environment_table(), *own)
    check_options(options)
    return options
