"""What musubi-tuner cannot train with, whether a config says so or a run has it."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields

from kohya_bucket.checks import quoted
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.listing import folder_key
from kohya_bucket.trainers.door.options import TABLE, WHERE_PLACED, AdapterOptions

_OPTIONS = WHERE_PLACED - {"merge_max_crop"} | {"focus"}


def conflicts(options: AdapterOptions) -> Iterator[str]:
    """What to change, for options that caches cannot have."""
    for field in fields(options):
        if field.name not in _OPTIONS and getattr(options, field.name) != field.default:
            several = "give each resolution [[datasets]] and a cache_directory of its own"
            remedy = several if field.name == "resolutions" else "leave it out"
            message = f"{field.name} is set, but musubi-tuner trains from caches that were made without it: {remedy}; "
            yield f"[{TABLE}] {message}{', '.join(sorted(_OPTIONS))} can be set"
    for name, policy in options.moving.items():
        message = f"{name} is {policy.name!r}, which trains images at other sizes, but caches have one size each"
        yield f"[{TABLE}] {message}: use 'keep', 'pad' or 'drop'"


def check_options(options: AdapterOptions) -> None:
    """Raise `ConfigError` with the first of the `conflicts`."""
    for conflict in conflicts(options):
        raise ConfigError(conflict)


def why_not_cached_in(folders: Sequence[str | None]) -> list[tuple[str, str, str] | None]:
    """For the cache folder of each dataset: code, message and remedy where it cannot be used; None where it can be.

    Datasets with one folder delete each other's caches, however its path is written.
    """
    keys = [None if folder is None else folder_key(folder) for folder in folders]
    spelled: dict[object, list[str | None]] = defaultdict(list)
    for folder, key in zip(folders, keys, strict=True):
        spelled[key].append(folder)
    out: list[tuple[str, str, str] | None] = []
    for folder, key in zip(folders, keys, strict=True):
        same = spelled[key]
        if folder is not None and (not {"*", "?"}.isdisjoint(folder) or not fnmatch.fnmatchcase(folder, folder)):
            message = f"musubi-tuner takes {quoted(folder)} for a pattern: it finds no cache there, or deletes others'"
            out.append(("cache-brackets", message, "set cache_directory to a folder without *, ? and brackets"))
        elif folder is not None and len(same) > 1:
            message = f"{quoted(folder)} is the cache folder of {len(same)} datasets, at which musubi-tuner stops"
            if len(spellings := sorted(set(map(quoted, same)))) > 1:
                message = f"{' and '.join(spellings)} are one folder, in which datasets delete each other's caches"
            out.append(("shared-cache", message, "give each dataset a cache_directory of its own"))
        else:
            out.append(None)
    return out
