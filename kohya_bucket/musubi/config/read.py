"""`read_config`: what a dataset config of musubi-tuner says, and what is wrong with it. No file beside it is opened."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.config_source import Source, load_source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.checks import nearest
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.config.model import ClipKeys, DatasetKeys, ImageKeys
from kohya_bucket.musubi.config.schema import CLIPS, DEPRECATED, GENERAL, IMAGES, SOURCES, Kind
from kohya_bucket.musubi.config.values import check_values

__all__ = ["MusubiConfig", "is_musubi", "read_config"]

_TABLE = "kohya_bucket"


@dataclass(frozen=True)
class MusubiConfig:
    """All that a config says.

    Attributes:
        path: the file.
        datasets: in order; those that musubi-tuner would refuse are there with what is known.
        places: where each begins, for messages: `line 7, dataset 1`.
        architecture: what is trained; None where nobody said it.
        table: the `[kohya_bucket]` table, or None.
        findings: everything that is wrong or notable.
    """

    path: Path
    datasets: tuple[DatasetKeys, ...]
    places: tuple[str, ...]
    architecture: Architecture | None
    table: Mapping[str, Any] | None
    findings: Findings


def is_musubi(data: Any) -> bool:
    """Whether the content of a config is meant for musubi-tuner: a data set has one of its keys and no subsets."""
    datasets = data.get("datasets") if isinstance(data, Mapping) else None
    tables = [one for one in datasets if isinstance(one, Mapping)] if isinstance(datasets, list) else []
    return any(key in one for one in tables for key in SOURCES) and not any("subsets" in one for one in tables)


def read_config(path: str | os.PathLike[str], architecture: Architecture | None = None) -> MusubiConfig:
    """Read a dataset config.

    Args:
        path: a `.toml` or `.json` file.
        architecture: what is trained with it.

    Raises:
        ConfigError: the file cannot be read at all, or has no data set. Everything else is in `findings`.
    """
    source, findings = load_source(path, "musubi-tuner"), Findings()
    data = dict(source.data)
    table = data.pop(_TABLE, None)
    for key in data.keys() - {"general", "datasets"}:
        known = ("general", "datasets", _TABLE)
        message = f"musubi-tuner stops at {key!r}: beside [general] and [[datasets]] there is nothing"
        findings.error("unknown-key", source.line_of(key).rstrip(", "), message, f"did you mean {nearest(key, known)}?")
    listed = data.get("datasets")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}: there is no [[datasets]] in it, so there is nothing to train")
    general = _taken(data.get("general", {}), GENERAL, ("general",), "general", source, findings)
    datasets, places = [], []
    for i, one in enumerate(listed):
        place = f"{source.line_of('datasets', i)}dataset {i + 1}"
        clips = isinstance(one, Mapping) and ("video_directory" in one or "video_jsonl_file" in one)
        own = _taken(one, CLIPS if clips else IMAGES, ("datasets", i), f"dataset {i + 1}", source, findings)
        if isinstance(one, Mapping) and not any(key in one for key in SOURCES):
            findings.error("no-source", place, "names no images and no clips", f"set one of {', '.join(SOURCES)}")
        datasets.append((ClipKeys if clips else ImageKeys)(**{**general, **own}))
        places.append(place)
    read = MusubiConfig(source.path or Path(path), tuple(datasets), tuple(places), architecture, table, findings)
    _check_caches(read)
    for keys, place in zip(datasets, places, strict=True):
        check_values(keys, place, architecture, findings)
    return read


def _taken(
    table: Any, known: Mapping[str, Kind], at: tuple[str | int, ...], name: str, source: Source, findings: Findings
) -> dict[str, Any]:
    """The keys of one table that can be used."""
    if not isinstance(table, Mapping):
        findings.error("not-a-table", name, f"is {table!r}, but must be a table of keys", "")
        return {}
    taken: dict[str, Any] = {}
    for key, value in _renamed(table, name, findings).items():
        place = f"{source.line_of(*at, key)}{name}"
        if key not in known:
            findings.error("unknown-key", place, f"musubi-tuner stops at the key {key!r}", _instead(key, known))
        elif not known[key].fits(value):
            message = f"{key} is {value!r}, at which musubi-tuner stops"
            findings.error("wrong-value", place, message, f"give {known[key].text}")
        else:
            taken[key] = known[key].taken(value)
    return taken


def _renamed(table: Mapping[str, Any], name: str, findings: Findings) -> dict[str, Any]:
    renamed = dict(table)
    for old, new in DEPRECATED.items():
        if old in renamed:
            value = renamed.pop(old)
            findings.note("old-key", name, f"{old} is now called {new}", "rename it")
            renamed.setdefault(new, value)
    return renamed


def _instead(key: str, known: Mapping[str, Kind]) -> str:
    if key in GENERAL or (key not in IMAGES and key not in CLIPS):
        return f"did you mean {nearest(key, known)}?"
    if known is GENERAL:
        return "it belongs into the [[datasets]] that it is about"
    of, other = ("images", "clips") if key in IMAGES else ("clips", "images")
    return f"it is for data sets of {of}, and this one has {other}"


def _check_caches(read: MusubiConfig) -> None:
    used = Counter(keys.caches for keys in read.datasets)
    for keys, place in zip(read.datasets, read.places, strict=True):
        if keys.caches is None and any((keys.directory, keys.jsonl_file)):
            message = "names no cache_directory, and with a list of files there is no folder to take for it"
            read.findings.error("no-cache-directory", place, message, "set cache_directory")
        elif used[keys.caches] > 1 and keys.caches is not None:
            message = (
                f"{keys.caches!r} is the cache folder of {used[keys.caches]} data sets, at which musubi-tuner stops"
            )
            read.findings.error("shared-cache", place, message, "give each a cache_directory of its own")
