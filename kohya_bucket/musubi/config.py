"""`read_config`: what a dataset config of musubi-tuner says, and what is wrong with it. No file beside it is opened.

Source of names and defaults: kohya-ss/musubi-tuner 0.3.6, `dataset/config_utils.py`. It checks values by `isinstance`:
true is a whole number to it, and 30 no fraction.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.config_source import (
    FLAG,
    FRACTION,
    ONE_OR_MORE,
    SIDES,
    SIZE,
    TEXT,
    WHOLE,
    WHOLES,
    Place,
    Range,
    Source,
    Type,
    check_range,
    load_source,
    read_table,
    unknown_key,
)
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.buckets.choices import EXTRACTIONS
from kohya_bucket.checks import nearest
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.architectures import ARCHITECTURES, Architecture
from kohya_bucket.musubi.checkout import clips_always_in_buckets, known_checkout

__all__ = [
    "CLIPS",
    "DEPRECATED",
    "GENERAL",
    "IMAGES",
    "SOURCES",
    "ClipKeys",
    "DatasetKeys",
    "ImageKeys",
    "MusubiConfig",
    "is_musubi",
    "read_config",
]


def _key(type_: Type, default: Any, *, general: bool = False, allowed: Range | None = None) -> Any:
    """One key: its type and default, whether it may stand in [general], and its range."""
    return field(default=default, metadata={"type": type_, "general": general, "allowed": allowed})


@dataclass(frozen=True)
class DatasetKeys:
    """What images and clips have in common. Sizes are (width, height). The fields are the keys."""

    resolution: tuple[int, int] = _key(SIZE, (960, 544), general=True, allowed=SIDES)
    enable_bucket: bool = _key(FLAG, False, general=True)
    bucket_no_upscale: bool = _key(FLAG, False, general=True)
    caption_extension: str | None = _key(TEXT, None, general=True)
    batch_size: int = _key(WHOLE, 1, general=True, allowed=ONE_OR_MORE)
    num_repeats: int = _key(WHOLE, 1, general=True)
    cache_directory: str | None = _key(TEXT, None)
    control_directory: str | None = _key(TEXT, None)
    fp_latent_window_size: int = _key(WHOLE, 9)

    @property
    def directory(self) -> str | None:
        """The folder that is listed, if one is."""
        return None

    @property
    def jsonl_file(self) -> str | None:
        """The list of items, if one is given; a folder comes first."""
        return None

    @property
    def caches(self) -> str | None:
        """Where its caches lie."""
        return self.cache_directory if self.cache_directory is not None else self.directory


@dataclass(frozen=True)
class ImageKeys(DatasetKeys):
    """A data set of images."""

    image_directory: str | None = _key(TEXT, None)
    image_jsonl_file: str | None = _key(TEXT, None)
    multiple_target: bool = _key(FLAG, False)
    fp_1f_clean_indices: tuple[int, ...] | None = _key(WHOLES, None)
    fp_1f_target_index: int | None = _key(WHOLE, None)
    fp_1f_no_post: bool = _key(FLAG, False)
    no_resize_control: bool = _key(FLAG, False)
    control_resolution: tuple[int, int] | None = _key(SIZE, None)

    @property
    def directory(self) -> str | None:
        return self.image_directory

    @property
    def jsonl_file(self) -> str | None:
        return self.image_jsonl_file


@dataclass(frozen=True)
class ClipKeys(DatasetKeys):
    """A data set of clips."""

    video_directory: str | None = _key(TEXT, None)
    video_jsonl_file: str | None = _key(TEXT, None)
    target_frames: tuple[int, ...] = _key(WHOLES, (1,))
    frame_extraction: str = _key(TEXT, "head")
    frame_stride: int = _key(WHOLE, 1)
    frame_sample: int = _key(WHOLE, 1)
    max_frames: int = _key(WHOLE, 129)
    source_fps: float | None = _key(FRACTION, None)

    @property
    def directory(self) -> str | None:
        return self.video_directory

    @property
    def jsonl_file(self) -> str | None:
        return self.video_jsonl_file


def _keys(of: type[DatasetKeys], *, general: bool = False) -> dict[str, Type]:
    return {f.name: f.metadata["type"] for f in fields(of) if f.metadata["general"] or not general}


GENERAL: Mapping[str, Type] = _keys(DatasetKeys, general=True)
"""Keys that every data set takes, and `[general]` for all of them."""

IMAGES: Mapping[str, Type] = _keys(ImageKeys)
"""Keys of a data set of images."""

CLIPS: Mapping[str, Type] = _keys(ClipKeys)
"""Keys of a data set of clips."""

_GENERAL, _IMAGES, _CLIPS = "[general]", "a data set of images", "a data set of clips"
_TABLES = {_GENERAL: GENERAL, _IMAGES: IMAGES, _CLIPS: CLIPS}

SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
"""Keys that say where the items are; one of them tells a config of musubi-tuner from one of sd-scripts."""

DEPRECATED: Mapping[str, str] = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
"""Old names of keys, which it still takes."""


_EXTRACTIONS = [name for name in EXTRACTIONS if name != "largest"]  # which is not musubi-tuner's


def check_values(keys: DatasetKeys, place: str, architecture: Architecture | None, findings: Findings) -> None:
    """Report values that musubi-tuner takes and cannot train with, or not as meant."""
    for one in fields(keys):
        if one.metadata["allowed"] is not None:
            check_range(one.name, getattr(keys, one.name), one.metadata["allowed"], place, findings)
    if keys.batch_size > 1 and architecture is not None and architecture.name == "mmh3":
        message = f"batch_size is {keys.batch_size}, but {architecture.title} trains one item at a time"
        findings.error("batch-size", place, f"{message}: musubi-tuner stops at the first batch", "set batch_size = 1")
    if keys.num_repeats < 1:
        message = f"num_repeats is {keys.num_repeats}, so nothing of it is trained"
        findings.warning("no-repeats", place, message, "set it to 1 or more, or remove the data set")
    if keys.caption_extension is not None and not keys.caption_extension.startswith("."):
        message = f"caption_extension is {keys.caption_extension!r}: im.png needs a caption im{keys.caption_extension}"
        findings.warning("caption-extension", place, message, f"begin it with a dot: '.{keys.caption_extension}'")
    elif keys.caption_extension is None and keys.directory is not None:
        message = "names no caption_extension, so musubi-tuner stops when it looks for captions"
        findings.error("caption-extension", place, message, "set it, e.g. caption_extension = '.txt'")
    if keys.bucket_no_upscale and not keys.enable_bucket:
        findings.note("no-upscale", place, "bucket_no_upscale does nothing while enable_bucket is off", "set both")
    if isinstance(keys, ClipKeys):
        _check_clips(keys, place, architecture, findings)


def usable_lengths(keys: ClipKeys) -> bool:
    """Whether runs of frames follow from the keys."""
    numbers = min(keys.frame_stride, keys.frame_sample, keys.max_frames) > 0
    lengths = keys.frame_extraction == "full" or min(keys.target_frames, default=0) > 0
    rate = keys.source_fps is None or 0 < keys.source_fps < float("inf")
    return keys.frame_extraction in _EXTRACTIONS and numbers and lengths and rate


def _check_clips(keys: ClipKeys, place: str, architecture: Architecture | None, findings: Findings) -> None:
    if keys.frame_extraction not in _EXTRACTIONS:
        near = nearest(keys.frame_extraction, _EXTRACTIONS) if keys.frame_extraction else "head"
        message = f"frame_extraction is {keys.frame_extraction!r}, at which musubi-tuner stops"
        findings.error("frame-extraction", place, message, f"use one of {', '.join(_EXTRACTIONS)}; nearest: {near}")
    elif not usable_lengths(keys):
        shown = {name: getattr(keys, name) for name in ("target_frames", "frame_stride", "frame_sample", "max_frames")}
        values = ", ".join(f"{name} {_shown(value)}" for name, value in shown.items())
        message = f"{values}, source_fps {keys.source_fps}: no frames follow from one of these"
        findings.error("frames", place, message, "give numbers of 1 or more, and a rate above 0")
    elif architecture is not None and keys.frame_extraction != "full":
        if min(keys.target_frames) < architecture.grid.base:
            message = f"target_frames {list(keys.target_frames)}: {architecture.title} needs {architecture.grid.base} "
            findings.error("frames", place, f"{message}frames or more, and musubi-tuner stops", "list longer ones")
            return
        lengths = architecture.grid.lengths(keys.target_frames)
        if set(lengths) != set(keys.target_frames):
            message = f"target_frames {list(keys.target_frames)} are rounded to {list(lengths)}"
            findings.note("target-frames", place, message, f"{architecture.title} takes {architecture.grid} frames")
    if architecture is not None and architecture.target_fps is None:
        able = ", ".join(a.name for a in ARCHITECTURES.values() if a.target_fps is not None)
        message = f"{architecture.title} trains no clips in musubi-tuner"
        findings.error("no-clips", place, message, f"--arch is one of {able} for clips")
    if architecture is not None and architecture.by_time and keys.source_fps is not None:
        message = f"source_fps is ignored: {architecture.title}'s clips are brought to "
        findings.note("source-fps", place, f"{message}{architecture.target_fps:g} frames per second by their times", "")
    if architecture is None and keys.source_fps is not None:
        message = f"source_fps is {keys.source_fps}, but how many frames are left depends on the model"
        findings.error("no-architecture", place, message, "name it, e.g. --arch wan")
    _check_clip_buckets(keys, place, architecture, findings)


def _check_clip_buckets(keys: ClipKeys, place: str, architecture: Architecture | None, findings: Findings) -> None:
    """What `enable_bucket` and `bucket_no_upscale` mean for clips, which depends on musubi-tuner's version."""
    if keys.enable_bucket and not keys.bucket_no_upscale:
        return
    package = known_checkout(architecture.trainer if architecture else None)
    if package is None:
        message = "clips are shown as the newest musubi-tuner places them; up to 0.3.4 it puts them in buckets and "
        message += "enlarges them, whatever enable_bucket and bucket_no_upscale say"
        findings.note("clip-buckets", place, message, "to see yours, name its trainer's path with --arch")
    if not clips_always_in_buckets(package):
        if not keys.enable_bucket:
            message = f"enable_bucket is off, so every clip is cut to {keys.resolution[0]}x{keys.resolution[1]}"
            findings.note("one-size", place, message, "for buckets, set enable_bucket = true")
        return
    if keys.bucket_no_upscale:
        message = "this musubi-tuner ignores bucket_no_upscale for clips: they are enlarged to their bucket"
        findings.note("no-upscale", place, message, "")
    if not keys.enable_bucket:
        message = "enable_bucket is off, but this musubi-tuner caches clips in buckets all the same, and without the "
        message += "plan a batch of clips of different sizes ends the training"
        findings.warning("clips-without-buckets", place, message, "set enable_bucket = true")


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


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
    general = _taken(data.get("general", {}), _GENERAL, ("general",), "[general]", source, findings)
    datasets, places = [], []
    for i, one in enumerate(listed):
        place = f"{source.line_of('datasets', i)}dataset {i + 1}"
        clips = isinstance(one, Mapping) and ("video_directory" in one or "video_jsonl_file" in one)
        own = _taken(one, _CLIPS if clips else _IMAGES, ("datasets", i), f"dataset {i + 1}", source, findings)
        if isinstance(one, Mapping) and not any(key in one for key in SOURCES):
            findings.error("no-source", place, "names no images and no clips", f"set one of {', '.join(SOURCES)}")
        datasets.append((ClipKeys if clips else ImageKeys)(**{**general, **own}))
        places.append(place)
    read = MusubiConfig(source.path or Path(path), tuple(datasets), tuple(places), architecture, table, findings)
    _check_caches(read)
    for keys, place in zip(datasets, places, strict=True):
        check_values(keys, place, architecture, findings)
    return read


def _taken(table: Any, kind: str, at: Place, name: str, source: Source, findings: Findings) -> dict[str, Any]:
    """The keys of one table that can be used."""
    table = _renamed(table, name, findings) if isinstance(table, Mapping) else table
    return read_table(table, _TABLES[kind], at, name, source, findings, lambda key: unknown_key(key, kind, _TABLES))


def _renamed(table: Mapping[str, Any], name: str, findings: Findings) -> dict[str, Any]:
    renamed = dict(table)
    for old, new in DEPRECATED.items():
        if old in renamed:
            value = renamed.pop(old)
            findings.note("old-key", name, f"{old} is now called {new}", "rename it")
            renamed.setdefault(new, value)
    return renamed


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
