"""`kohya-bucket doctor` of a musubi-tuner config: its mistakes, and the images and clips that will fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kohya_bucket.adapter.findings import Section
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import undecodable
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.config import ClipKeys, MusubiConfig, read_config
from kohya_bucket.musubi.options import options_of
from kohya_bucket.musubi.plan import PlacedData, Reading, overview, seconds_lost
from kohya_bucket.texts import counted, some

__all__ = ["config_section"]

ShowProgress = Callable[[str], AbstractContextManager[Progress | None]]


def config_section(path: Path, architecture: Architecture | None, show: ShowProgress, *, decode: bool) -> Section:
    """Read a config as musubi-tuner does, and look at every image and clip that it names.

    Args:
        show: makes a progress function for a title.
        decode: decode all images, and all clips to the end; else their headers and containers are read only.

    Raises:
        KohyaBucketError: the config cannot be read at all.
    """
    section = Section(f"config {path}, of musubi-tuner")
    read = read_config(path, architecture)
    section.findings = read.findings
    title = (
        "any model but HiDream-O1 and MiniMax-H3; name it for advice that fits: --arch wan"
        if architecture is None
        else ""
    )
    section.facts.append(("checked for", title or getattr(architecture, "title", "")))
    try:
        options = options_of(read)
        if not section.stops:
            _planned(section, read, options, show, decode)
    except KohyaBucketError as error:
        section.findings.error("settings", "", str(error))
    return section


def _planned(section: Section, read: MusubiConfig, options: AdapterOptions, show: ShowProgress, decode: bool) -> None:
    """What training would be, in facts and findings."""
    with show("reading images and clips") as progress:
        seen = overview(read, options, how=Reading(decode, progress))
    for number, data in enumerate(seen.datasets, 1):
        section.facts.append((f"dataset {number}", _summary(data)))
    if not decode:
        return
    known = {path for data in seen.datasets for path, _ in data.left_out}
    paths = [path for data in seen.datasets if data.clips is None for path in data.paths if path not in known]
    with show("decoding every image") as progress:
        bad = undecodable(list(dict.fromkeys(paths)), progress)
    clips = sum(len(data.paths) for data in seen.datasets if data.clips is not None)
    section.facts.append(("decoded", f"{counted(len(set(paths)), 'image')} and {counted(clips, 'clip')}"))
    if bad:
        names = [f"{path}: {reason}" for path, reason in bad]
        message = f"{counted(len(bad), 'image')} that cannot be decoded ({some(names, 1)}), at which musubi-tuner stops"
        section.findings.warning("undecodable", "", message, "repair or remove", names)


def _summary(data: PlacedData) -> str:
    what = "clip" if isinstance(data.keys, ClipKeys) else "image"
    batches = sum(row.batches for row in data.items.rows())
    text = f"{counted(len(data.paths), what)}, {counted(len(data.items.keys), 'item')} in "
    text += f"{counted(len(data.items.bucket_keys), 'bucket')}, {batches:,} batch{'es' * (batches != 1)} an epoch"
    return text if data.clips is None else f"{text}, {seconds_lost(data):,.1f} s in no item"
