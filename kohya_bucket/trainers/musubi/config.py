"""`read_config`: what a dataset config of musubi-tuner says, and what is wrong with it. No file beside it is opened."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.clips import EXTRACTIONS
from kohya_bucket.checks import nearest
from kohya_bucket.texts import some
from kohya_bucket.trainers.door.config_source import (
    LARGEST,
    ConfigSource,
    TablePath,
    check_range,
    check_repeats,
    load_source,
    no_datasets,
    read_table,
    real_path,
    unknown_key,
)
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.door.options import TABLE, AdapterOptions
from kohya_bucket.trainers.musubi.architectures import ANY, ARCHITECTURES, OF_TOKENS, Family
from kohya_bucket.trainers.musubi.checkout import clips_always_in_buckets, keys_of_configs, known_checkout
from kohya_bucket.trainers.musubi.keys import (
    CLIPS,
    DEPRECATED,
    GENERAL,
    IMAGES,
    SOURCES,
    ClipKeys,
    CommonKeys,
    ImageKeys,
)
from kohya_bucket.trainers.musubi.refusals import conflicts, why_not_cached_in

_TOP = ("general", "datasets")
_GENERAL, _IMAGES, _CLIPS = "[general]", "a dataset of images", "a dataset of clips"
_TABLES = {_GENERAL: GENERAL, _IMAGES: IMAGES, _CLIPS: CLIPS}
_EXTRACTIONS = [name for name in EXTRACTIONS if name != "largest"]  # which is not musubi-tuner's


@dataclass(frozen=True)
class MusubiConfig:
    """All that a config says.

    Attributes:
        datasets: in order; those that musubi-tuner would refuse are there with what is known.
        readable: whether all values of each can be read; else a default stands there.
        places: where each begins, for messages: `line 7, dataset 1`.
        model: what is trained, where it is not named that of `[kohya_bucket]`; `ANY` where neither says it.
        options: those of its `[kohya_bucket]` table, over the environment's; None where a finding says what is wrong.
        findings: everything that is wrong or notable.
    """

    path: Path
    datasets: tuple[CommonKeys, ...]
    readable: tuple[bool, ...]
    places: tuple[str, ...]
    model: Family
    options: AdapterOptions | None
    findings: Findings

    @cached_property
    def folders(self) -> frozenset[str]:
        """The folders that its datasets name, as `os.path.realpath` has them."""
        of_all = ((keys.directory, keys.control_directory, keys.cache_directory) for keys in self.datasets)
        return frozenset(real_path(folder) for folders in of_all for folder in folders if folder)


def is_musubi(data: Any) -> bool:
    """Whether a config is meant for musubi-tuner: a dataset has one of its keys, whatever its subsets have, or these do
    and have no images as sd-scripts names them.
    """
    datasets = data.get("datasets") if isinstance(data, Mapping) else None
    tables = [one for one in datasets if isinstance(one, Mapping)] if isinstance(datasets, list) else []
    dataset_keys = {str(key) for table in tables for key in table}
    inner = {str(key) for table in tables for one in _subsets_of(table) for key in one}
    return _has_its_keys(dataset_keys) or (_has_its_keys(inner) and not inner & {"image_dir", "metadata_file"})


def _has_its_keys(keys: Collection[str]) -> bool:
    return any(key in (*SOURCES, "cache_directory") or key.startswith("video") for key in keys)


def _subsets_of(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    subsets = table.get("subsets")
    return [one for one in subsets if isinstance(one, Mapping)] if isinstance(subsets, list) else []


def _without_subsets(
    listed: Sequence[Any], source: ConfigSource, findings: Findings
) -> Iterator[tuple[Any, TablePath, str]]:
    """(table, place, name) of each dataset; subsets, which musubi-tuner does not have, are named and taken as such."""
    for i, one in enumerate(listed):
        at, name = ("datasets", i), f"dataset {i + 1}"
        if not isinstance(one, Mapping) or "subsets" not in one:
            yield one, at, name
            continue
        message = "musubi-tuner has no subsets, and stops at [[datasets.subsets]]"
        remedy = "write their keys into [[datasets]], one for each: image_directory, cache_directory, num_repeats, …"
        findings.error("misplaced-key", f"{source.line_of(*at, 'subsets')}{name}", message, remedy, ("subsets",))
        shared_keys = {key: value for key, value in one.items() if key != "subsets"}
        inner = _subsets_of(one)
        for j, subset in enumerate(inner):
            yield {**shared_keys, **subset}, (*at, "subsets", j), f"{name}, subset {j + 1}"
        if not inner:
            yield shared_keys, at, name


def read_config(path: str | os.PathLike[str], model: Family = ANY) -> MusubiConfig:
    """Read a dataset config, `.toml` or `.json`.

    Raises:
        ConfigError: the file cannot be read at all, or has no dataset. Everything else is in `findings`.
    """
    source, findings = load_source(path, "musubi-tuner"), Findings()
    data = dict(source.data)
    data.pop(TABLE, None)
    further = keys_of_configs(known_checkout(model.trainer)).difference(*_TABLES.values(), _TOP)
    _say_what_is_read(model, findings)
    _take_out_further(data, further, "", findings)
    for key in [key for key in data if key not in _TOP]:
        code, _, remedy = unknown_key(str(key), "the top level", {"the top level": {*_TOP, TABLE}, **_TABLES})
        message = f"musubi-tuner stops at {key!r}: beside [general] and [[datasets]] there is nothing"
        findings.error(code, source.line_of(key).rstrip(", "), message, remedy)
    listed = data.get("datasets")
    if not isinstance(listed, list) or not listed:
        raise no_datasets(path, findings)
    general, general_read = _taken(
        data.get("general", {}), _GENERAL, ("general",), "[general]", source, findings, further
    )
    datasets, places, readable = [], [], []
    for one, at, name in _without_subsets(listed, source, findings):
        place = source.line_of(*at) + name
        named = [key for key in SOURCES if isinstance(one, Mapping) and key in one]
        here = {str(key) for key in one} - further if isinstance(one, Mapping) else set()
        clips = any(key.startswith("video") for key in here)
        dataset_keys, own_read = _taken(one, _CLIPS if clips else _IMAGES, at, name, source, findings, further)
        if isinstance(one, Mapping) and not named and dataset_keys.keys().isdisjoint(SOURCES):
            report = findings.error if len(here) == len(one) else findings.warning  # further keys may name others
            report("no-source", place, "names no images and no clips", f"set one of {', '.join(SOURCES)}")
        datasets.append((ClipKeys if clips else ImageKeys)(**{**general, **dataset_keys}))
        places.append(place)
        readable.append(general_read and own_read)
    _check_caches(datasets, places, findings)
    options = AdapterOptions.of_config(source, findings)
    if not model.name and options is not None:
        model = ARCHITECTURES[OF_TOKENS[options.model]] if options.model in OF_TOKENS else model
    for keys, place in zip(datasets, places, strict=True):
        _check_values(keys, place, model, findings)
    for conflict in conflicts(options or AdapterOptions()):
        findings.error("settings", source.line_of(TABLE).rstrip(", "), conflict)
        options = None
    file = source.path or Path(path)
    return MusubiConfig(file, tuple(datasets), tuple(readable), tuple(places), model, options, findings)


def _taken(
    table: Any, kind: str, at: TablePath, name: str, source: ConfigSource, findings: Findings,
    further: Collection[str],
) -> tuple[dict[str, Any], bool]:  # fmt: skip
    """The keys of one table that can be used, and whether these are all of those that it has.

    Args:
        further: keys that are not known here, and are to the musubi-tuner at hand.
    """
    if isinstance(table, Mapping):
        table = dict(table)
        for old, new in DEPRECATED.items():
            if old in table:
                findings.note("old-key", name, f"{old} is now called {new}", "rename it")
                table.setdefault(new, table.pop(old))
        _take_out_further(table, further, source.line_of(*at) + name, findings)
    types = _TABLES[kind]
    values = read_table(table, types, at, name, source, findings, lambda key: unknown_key(key, kind, _TABLES))
    return values, isinstance(table, Mapping) and table.keys() & types.keys() <= values.keys()


def _take_out_further(table: dict[str, Any], further: Collection[str], place: str, findings: Findings) -> None:
    if keys := [key for key in table if key in further]:
        message = f"{some(keys)}: known to the musubi-tuner at hand and not here, so what is shown is without"
        findings.warning("further-key", place, message, names=keys)
        for key in keys:
            del table[key]


def _say_what_is_read(model: Family, findings: Findings) -> None:
    if model.defined_in is None:
        return
    rate = "no clips" if model.target_fps is None else f"{model.grid} frames, {model.target_fps:g} a second"
    message = f"{model.title} is read from {model.defined_in}: sides of {model.steps}, {rate}. Not known: the size of "
    message += "its latents, and whether its caches hold control images"
    if not model.plain:
        message += ". Its data sets do more for it than for others, so its caches are left to musubi-tuner, unchecked"
    findings.note("read-from-checkout", "", message)


def _check_caches(datasets: Sequence[CommonKeys], places: list[str], findings: Findings) -> None:
    for keys, place, refused in zip(
        datasets, places, why_not_cached_in([keys.caches for keys in datasets]), strict=True
    ):
        if keys.caches is None and keys.jsonl_file:
            message = "names no cache_directory, and with a list of files there is no folder to take for it"
            findings.error("no-cache-directory", place, message, "set cache_directory")
        elif refused is not None:
            findings.error(*refused[:1], place, *refused[1:])


def _check_values(keys: CommonKeys, place: str, model: Family, findings: Findings) -> None:
    """Report values that musubi-tuner takes and cannot train with, or not as meant."""
    for one in fields(keys):
        if one.metadata["allowed"] is not None:
            check_range(one.name, getattr(keys, one.name), one.metadata["allowed"], place, findings)
    if keys.batch_size > 1 and model.name == "mmh3":
        message = f"batch_size is {keys.batch_size}, but {model.title} trains one item at a time"
        findings.error("batch-size", place, f"{message}: musubi-tuner stops at the first batch", "set batch_size = 1")
    check_repeats(keys.num_repeats, place, findings)
    if keys.num_repeats < 1:
        message = f"num_repeats is {keys.num_repeats}, so nothing of it is trained"
        findings.warning("no-repeats", place, message, "set it to 1 or more, or remove the dataset")
    ending = keys.caption_extension
    if ending is not None and not ending.startswith("."):
        message = f"caption_extension is {ending!r}: im.png needs a caption im{ending}"
        findings.warning("caption-extension", place, message, f"begin it with a dot: '.{ending}'")
    elif ending is None and keys.directory is not None:
        message = "names no caption_extension, so musubi-tuner stops when it looks for captions"
        findings.error("caption-extension", place, message, "set it, e.g. caption_extension = '.txt'")
    if keys.bucket_no_upscale and not keys.enable_bucket:
        findings.note("no-upscale", place, "bucket_no_upscale does nothing while enable_bucket is off", "set both")
    if isinstance(keys, ClipKeys):
        _check_frames(keys, place, model, findings)
        check_model(keys, place, model, findings)
        _check_clip_buckets(keys, place, model, findings)


def buckets_follow(keys: CommonKeys, place: str, model: Family) -> bool:
    """Whether the items of a dataset can be placed, though musubi-tuner may stop at something else in its config."""
    mistakes = Findings()
    _check_values(keys, place, model, mistakes)
    return {finding.code for finding in mistakes.of(Severity.ERROR)} <= {"batch-size", "caption-extension"}


def _check_frames(keys: ClipKeys, place: str, model: Family, findings: Findings) -> None:
    how, lengths = keys.frame_extraction, list(keys.target_frames)
    if how not in _EXTRACTIONS:
        message = f"frame_extraction is {how!r}, at which musubi-tuner stops"
        remedy = f"use one of {', '.join(_EXTRACTIONS)}; nearest: {nearest(how or 'head', _EXTRACTIONS)}"
        findings.error("frame-extraction", place, message, remedy)
        return
    asked = 1 if how == "full" else min(lengths, default=0)
    rate = 1.0 if keys.source_fps is None else keys.source_fps
    numbers = keys.frame_stride, keys.frame_sample, keys.max_frames
    if min(*numbers, asked) < 1 or max(*numbers, *lengths) > LARGEST or not 0 < rate < float("inf"):
        message = f"target_frames {lengths}, frame_stride {keys.frame_stride}, frame_sample {keys.frame_sample}, "
        message += f"max_frames {keys.max_frames}, source_fps {keys.source_fps}: no frames follow from one of these"
        findings.error("frames", place, message, f"give numbers from 1 to {LARGEST:,}, and a rate above 0")
    elif how != "full" and model.name and asked < model.grid.base:
        message = f"target_frames {lengths}: {model.title} needs {model.grid.base} frames or more"
        findings.error("frames", place, f"{message}, and musubi-tuner stops", "list longer ones")
    elif how != "full" and model.name and set(rounded := model.grid.lengths(lengths)) != set(lengths):
        message = f"target_frames {lengths} are rounded to {list(rounded)}"
        findings.note("target-frames", place, message, f"{model.title} takes {model.grid} frames")


NEEDS_MODEL = "needs-model"
"""The code of a finding that stops no training: without the model, nothing can be shown of a dataset."""


def frames_follow(keys: CommonKeys, model: Family) -> bool:
    """Whether it is known how many frames a dataset's clips have in training."""
    return bool(model.name) or getattr(keys, "source_fps", None) is None


def check_model(keys: ClipKeys, place: str, model: Family, findings: Findings) -> None:
    """Whether the model trains clips, and what it does with their rate."""
    if not frames_follow(keys, model):
        message = (
            f"source_fps is {keys.source_fps}, and how many frames are left depends on the model, which is not named"
        )
        remedy = "name it, e.g. --arch wan, or model = 'wan-14b' under [kohya_bucket]"
        findings.warning(NEEDS_MODEL, place, message, remedy)
    if model.name and model.target_fps is None:
        able = ", ".join(a.name for a in ARCHITECTURES.values() if a.target_fps is not None)
        message = f"{model.title} trains no clips in musubi-tuner"
        findings.error("no-clips", place, message, f"--arch is one of {able} for clips")
    if model.by_time and keys.source_fps is not None:
        message = f"source_fps is ignored: {model.title}'s clips are brought to "
        findings.note("source-fps", place, f"{message}{model.target_fps:g} frames per second by their times")


def _check_clip_buckets(keys: ClipKeys, place: str, model: Family, findings: Findings) -> None:
    """What `enable_bucket` and `bucket_no_upscale` mean for clips, which depends on musubi-tuner's version."""
    if keys.enable_bucket and not keys.bucket_no_upscale:
        return
    package = known_checkout(model.trainer)
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
        findings.note("no-upscale", place, message)
    if not keys.enable_bucket:
        message = "enable_bucket is off, but this musubi-tuner caches clips in buckets all the same, and without the "
        message += "plan a batch of clips of different sizes ends the training"
        findings.warning("clips-without-buckets", place, message, "set enable_bucket = true")
