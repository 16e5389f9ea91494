"""What the three readers of a dataset (DreamBooth, fine-tuning, ControlNet) share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.config_source import MOST_REPEATS, check_repeats
from kohya_bucket.trainers.door.file_findings import repaired
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import refuse_conflicts
from kohya_bucket.trainers.sdscripts.config.keys import DatasetConfig, DatasetKind, SubsetConfig
from kohya_bucket.trainers.sdscripts.config.releases import NEWEST, Feature, Release
from kohya_bucket.trainers.sdscripts.dataset_images import (
    CONTROL_IN_THE_MIDDLE,
    DatasetTable,
    Skips,
    refuse_random_crops,
    skipped_images,
)


def refuse_lost_focus(config: DatasetConfig, options: AdapterOptions, release: Release) -> None:
    """Raise `ConfigError` where a focus is set that training this dataset would not keep."""
    if options.focus:
        refuse_random_crops(config.subsets, options)
        refuse_conflicts(config.dataset_keys, options)
        if config.kind is DatasetKind.CONTROLNET and Feature.CONTROL_CUTS not in release:
            raise ConfigError(CONTROL_IN_THE_MIDDLE)


@dataclass
class ReadContext:
    """What one run over a config carries along.

    Attributes:
        base: the folder of the config file.
        captions: open every caption file, as sd-scripts does.
        metadata_cache: the option of that name, for sizes that decide which images there are.
        named_folders: the real paths of all folders that the config names.
        written_caches: image lists that sd-scripts would write into `metadata_cache.json` files while it reads
            this config, and would read again for later datasets. Nothing is written here.
    """

    findings: Findings
    release: Release = NEWEST
    base: Path | None = None
    captions: bool = True
    metadata_cache: str = "auto"
    named_folders: frozenset[str] = frozenset()
    written_caches: dict[str, list[Any]] = field(default_factory=dict)


def is_used(subset: SubsetConfig, seen: set[str | None], training: bool, findings: Findings) -> bool:
    """Whether sd-scripts takes a subset: with repeats of 1 or more, and each folder or file once.

    `seen` are those of the subsets before it; one that turned out to be empty does not count.
    """
    repeats = subset.num_repeats if training or subset.kind is not DatasetKind.DREAMBOOTH else 1
    check_repeats(repeats, subset.place, findings)
    if repeats < 1:
        message = f"num_repeats is {repeats}, so sd-scripts skips {subset.source!r}"
        findings.warning("no-repeats", subset.place, message, "set it to 1 or more, or remove the subset")
    elif repeats <= MOST_REPEATS and subset.source in seen:
        message = f"{subset.source!r} was given before in this dataset; sd-scripts uses the first and skips this one"
        findings.warning("duplicate-subset", subset.place, message, "remove one; use num_repeats to repeat it")
    return 1 <= repeats <= MOST_REPEATS and subset.source not in seen


@dataclass(slots=True)
class Entry:
    """One image; `size` is the size that metadata states, or None."""

    key: str
    path: str
    repeats: int = 1
    subset: int = 0
    size: tuple[int, int] | None = None
    is_reg: bool = False
    caption: str | None = None
    conditioning: str = ""


class Registry:
    """A growing list of images, as sd-scripts' `register_image` keeps it: a later entry of the same key takes the place
    of the one before.

    `skipped` collects (key, reason) of the images that are left out for their size.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.skipped: list[tuple[str, str]] = []
        self._replaced: dict[tuple[int, int], list[str]] = {}

    def add(self, entry: Entry) -> None:
        before = self.entries.get(entry.key)
        if before is not None:
            self._replaced.setdefault((before.subset, entry.subset), []).append(entry.key)
        self.entries[entry.key] = entry

    def report(self, subsets: tuple[SubsetConfig, ...], findings: Findings) -> None:
        """Name images that two subsets hold under one key."""
        for (first, second), keys in self._replaced.items():
            message = (
                f"{counted(len(keys), 'image')} also in subset {first} under the same name; sd-scripts keeps one of "
                f"each, with the repeats and captions of subset {second} ({some(keys)})"
            )
            remedy = "give metadata unique keys (longer or absolute paths), or remove the doubled folder"
            findings.warning("same-key", subsets[second - 1].place, message, remedy, keys)

    def as_table(self) -> DatasetTable:
        entries = list(self.entries.values())
        captions, conditioning = tuple(e.caption for e in entries), tuple(e.conditioning for e in entries)
        return DatasetTable(
            keys=tuple(e.key for e in entries),
            paths=tuple(e.path for e in entries),
            stated_sizes=np.array([e.size or (0, 0) for e in entries], dtype=np.int32).reshape(-1, 2),
            repeats=np.array([e.repeats for e in entries], dtype=np.int64),
            is_reg=np.array([e.is_reg for e in entries], dtype=np.bool_),
            subset=np.array([e.subset for e in entries], dtype=np.int32),
            captions=captions if set(captions) - {None} else (),
            conditioning=conditioning if any(conditioning) else (),
            skipped=tuple(self.skipped),
        )


def large_enough(
    listed: Sequence[Entry], dataset: DatasetConfig, subset: SubsetConfig, registry: Registry, reading: ReadContext
) -> tuple[list[Entry], Skips]:
    """Those that `skip_image_resolution` does not leave out, by stated sizes where there are some."""
    findings, paths = reading.findings, [entry.path for entry in listed]
    skips = skipped_images(
        paths, [entry.size for entry in listed], dataset.skip_image_resolution, reading.metadata_cache
    )
    registry.skipped += [(listed[i].key, reason) for i, reason in skips.reasons.items()]
    reasons = {paths[i]: skips.reasons[i] for i in skips.unreadable if os.path.exists(paths[i])}
    if unreadable := [f"{path}: {reason}" for path, reason in reasons.items()]:
        message = (
            f"{counted(len(unreadable), 'image')} cannot be read, and with skip_image_resolution sd-scripts leaves "
            f"such images out without a message ({some(unreadable)})"
        )
        findings.warning("unreadable-image", subset.place, message, repaired(reasons), unreadable)
    if listed and len(skips.reasons) == len(listed):
        width, height = dataset.skip_image_resolution or (0, 0)
        message = f"all {len(listed)} images have no more pixels than skip_image_resolution {width}x{height}"
        stops = dataset.validation_split > 0 and not subset.is_reg
        if stops:
            message += ", and with validation_split sd-scripts stops at a folder without images"
        report = findings.error if stops else findings.warning
        report("all-skipped", subset.place, message, "lower it, or remove the subset")
    return [entry for i, entry in enumerate(listed) if i not in skips.reasons], skips
