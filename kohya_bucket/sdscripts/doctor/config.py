"""A dataset config: its mistakes, and the images that will fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.options import AdapterOptions, environment_table
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.pixels.undecodable import undecodable
from kohya_bucket.images.progress import Progress
from kohya_bucket.sdscripts.config import Config, Release, Severity, read_config
from kohya_bucket.sdscripts.doctor.section import Section
from kohya_bucket.sdscripts.plan.overview import DatasetOverview, overview
from kohya_bucket.texts import some

__all__ = ["Examined", "config_section"]

ShowProgress = Callable[[str], AbstractContextManager[Progress | None]]


@dataclass(frozen=True)
class Examined:
    """A config without mistakes that stop it, for further looks."""

    read: Config
    options: AdapterOptions


def config_section(
    path: Path, given: Mapping[str, Any], release: Release, show: ShowProgress, *, decode: bool = True
) -> tuple[Section, Examined | None]:
    """Read the config as the trainer does, and look at every image that it names.

    Args:
        given: values from the trainer's command line, where the config is silent.
        release: the version of sd-scripts to follow.
        show: makes a progress function for a title.
        decode: decode all images; else their headers are read only.

    Raises:
        KohyaBucketError: the config cannot be read at all.
    """
    section = Section(f"config {path}")
    read = read_config(path, given, release=release)
    section.findings = read.findings
    if read.findings.of(Severity.ERROR):
        return section, None
    try:
        tables = environment_table() + ([(str(path), read.table)] if read.table is not None else [])
        options = AdapterOptions.from_tables(*tables)
        with show("reading image headers") as progress:
            seen = overview(read, options, (1,), 1, progress)
    except KohyaBucketError as error:
        section.findings.error("settings", "", str(error))
        return section, None
    left_out: set[str] = set()
    for number, dataset in enumerate(seen.datasets, 1):
        section.facts.append((f"dataset {number}", _summary(dataset)))
        left_out |= _name_left_out(section, dataset)
    for row in seen.gpus:
        if row.never_trained:
            section.findings.warning("never-trained", "", row.left_over, names=row.never_trained)
    if decode:
        _decode(section, read, left_out, show)
    return section, Examined(read, options)


def _summary(dataset: DatasetOverview) -> str:
    images = dataset.images
    counts = ((len(images.keys), "image"), (len(images.buckets), "bucket"), (images.batches, "batch"))
    number, buckets, batches = (
        f"{n:,} {what}{'' if n == 1 else 'es' if what == 'batch' else 's'}" for n, what in counts
    )
    text = f"{number} in {buckets}, {batches} an epoch"
    if dataset.read.images.skipped:
        text += f", {len(dataset.read.images.skipped):,} left out by skip_image_resolution"
    return text + (f", {dataset.rotated:,} with an EXIF rotation that is not obeyed" if dataset.rotated else "")


def _name_left_out(section: Section, dataset: DatasetOverview) -> set[str]:
    if dataset.left_out:
        names = [f"{key}: {reason}" for key, reason in dataset.left_out]
        message = (
            f"{_images(len(names))} not trained ({some(names, 1)}); sd-scripts alone would stop at them when they are "
            "read or loaded"
        )
        remedy = "repair or remove"
        if dataset.read.config.bucket_no_upscale:
            remedy += ", or set bucket_no_upscale = false for the small ones"
        section.findings.warning("left-out", dataset.read.config.place, message, remedy, names)
    images = dataset.read.images
    path_of = dict(zip(images.keys, images.paths, strict=True))
    return {path_of[key] for key, _ in dataset.left_out}


def _decode(section: Section, read: Config, known: set[str], show: ShowProgress) -> None:
    lists = [found for d in read.datasets for found in (d.images, d.validation) if found is not None]
    every = [path for found in lists for path in (*found.paths, *found.conditioning) if path and path not in known]
    with show("decoding every image") as progress:
        bad = undecodable(list(dict.fromkeys(every)), progress)
    section.facts.append(("decoded", f"{len(set(every)):,} images, {len(bad):,} of them cannot be"))
    if bad:
        names = [f"{path}: {reason}" for path, reason in bad]
        message = f"{_images(len(bad))} not whole, and training stops at the first of them ({some(names, 1)})"
        section.findings.error("undecodable", "", message, "repair or remove", names)


def _images(count: int) -> str:
    return "1 image is" if count == 1 else f"{count:,} images are"
