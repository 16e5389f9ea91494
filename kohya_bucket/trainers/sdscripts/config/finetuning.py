"""The images of a fine-tuning dataset. Source: sd-scripts' `FineTuningDataset.__init__`.

A file is folder and key joined; since 0.10.6 a key that names no file is looked up.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.errors import may_pass
from kohya_bucket.inputs import MAX_TABLE_BYTES, read_input
from kohya_bucket.texts import is_whole, json_mistake, parse_json, some
from kohya_bucket.trainers.sdscripts.config.caches import check_captions
from kohya_bucket.trainers.sdscripts.config.files import (
    READ_AGAIN,
    check_stems,
    missing_folder,
    remedy_for_missing,
)
from kohya_bucket.trainers.sdscripts.config.keys import DatasetConfig, SubsetConfig
from kohya_bucket.trainers.sdscripts.config.model import Entry, ReadContext, Registry, is_used, large_enough
from kohya_bucket.trainers.sdscripts.config.releases import Feature, Release
from kohya_bucket.trainers.sdscripts.dataset_images import image_named


def list_finetuning(dataset: DatasetConfig, reading: ReadContext) -> Registry:
    """The images of all metadata files, of each those with the longest keys first."""
    registry = Registry()
    seen: set[str | None] = set()
    for subset in dataset.subsets:
        if not is_used(subset, seen, True, reading.findings):
            continue
        seen.add(subset.source)
        metadata = _read_metadata(subset, reading)
        if not metadata:
            continue
        listed = list(_entries(metadata, subset, reading.release))
        kept, skips = large_enough(listed, dataset, subset, registry, reading)
        _report_missing(kept + [listed[i] for i in skips.unreadable], subset, reading)
        check_stems([entry.path for entry in kept], subset.place, reading.findings)
        for entry in kept:
            entry.caption = _caption(metadata[entry.key], subset, reading.release)
            registry.add(entry)
        check_captions(dataset, subset, [(entry.key, entry.caption) for entry in kept], (), reading.findings)
    registry.report(dataset.subsets, reading.findings)
    return registry


def _caption(entry: dict[str, Any], subset: SubsetConfig, release: Release) -> str:
    """The caption of a metadata's entry, with the tags behind it, as sd-scripts trains them."""
    caption, tags = entry.get("caption") or "", entry.get("tags") or ""
    if not (subset.enable_wildcard and tags):
        return subset.caption_separator.join(filter(None, (caption, tags)))
    tags = tags.replace("\n", subset.caption_separator)
    lines = [f"{line}{subset.caption_separator}{tags}" for line in caption.split("\n") if line.strip()]
    if not lines and Feature.TAGS_ALONE in release:
        lines = [tags]
    return "\n".join(lines)


def _entries(metadata: dict[str, Any], subset: SubsetConfig, release: Release) -> Iterator[Entry]:
    for key in sorted(metadata, key=len, reverse=True):
        path = key if os.path.isabs(key) else os.path.join(subset.image_dir or "", key)
        if Feature.STEMS in release and not (os.path.splitext(key)[1] and os.path.exists(path)):
            path = image_named(os.path.join(os.path.dirname(path), os.path.basename(key))) or path
        yield Entry(key, path, subset.num_repeats, subset.number, _size(metadata[key].get("image_size")))


def _size(value: Any) -> tuple[int, int] | None:
    return None if value is None else (int(value[0]), int(value[1]))


def _read_metadata(subset: SubsetConfig, reading: ReadContext) -> dict[str, Any]:
    """Entries by key; empty, with a finding, where the file cannot be used."""
    findings, where, path = reading.findings, subset.place, subset.metadata_file
    if path is None:
        return {}
    if subset.image_dir is not None and not os.path.isdir(subset.image_dir):
        missing_folder("image_dir", subset.image_dir, findings, where, reading.base)
    if not os.path.isfile(path):
        message = f"metadata_file {quoted(path)} does not exist"
        findings.error("missing-metadata", where, message, remedy_for_missing(path, reading.base), (path,))
        return {}
    try:
        metadata = _parse(path, reading.release)
        _check_entries(metadata, subset)
    except UnicodeDecodeError as error:
        message = f"metadata_file {quoted(path)} is not UTF-8 ({error}), which makes sd-scripts stop"
        findings.error("broken-metadata", where, message, "save it as UTF-8", (path,))
        return {}
    except (ValueError, OSError, RecursionError) as error:
        remedy = READ_AGAIN if may_pass(error) else "correct the file"
        findings.error("broken-metadata", where, f"metadata_file {quoted(path)}: {error}", remedy, (path,))
        return {}
    if not metadata:
        message = f"metadata_file {quoted(path)} lists no image, so sd-scripts skips it"
        findings.error("empty-metadata", where, message, "add entries or remove the subset", (path,))
    return metadata


def _parse(path: str, release: Release) -> dict[str, Any]:
    """The entries of a `.json` or `.jsonl` file by key, as sd-scripts reads it. `ValueError` where it would stop."""
    with io.StringIO(read_input(path, MAX_TABLE_BYTES).decode("utf-8"), newline=None) as file:
        if file.read(1) == "\ufeff":
            raise ValueError(
                "starts with a byte order mark, which makes sd-scripts stop; save it as 'UTF-8', not 'UTF-8 with BOM'"
            )
        file.seek(0)
        if path.endswith(".jsonl"):
            return _of_lines(file, release)
        data = parse_json(file.read())
        if not isinstance(data, dict):
            raise ValueError(f"holds a {type(data).__name__}, but must hold an object of entries by image path")
        return data


def _of_lines(file: Iterable[str], release: Release) -> dict[str, Any]:
    metadata = {}
    for number, line in enumerate(file, 1):
        if number == 1 and line.lstrip().startswith("["):
            raise ValueError("it holds a JSON list, but each line must be an object of its own, with its image_path")
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            what = "an empty line" if not line.strip() else json_mistake(line, error)
            raise ValueError(f"line {number}: {what}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("image_path"), str):
            raise ValueError(f"line {number}: every line needs an image_path")
        if Feature.STEMS in release and "width" in entry and "height" in entry:
            entry["image_size"] = [entry["width"], entry["height"]]
        metadata[entry["image_path"]] = {k: entry[k] for k in ("caption", "image_size", "tags") if k in entry}
    return metadata


def _check_entries(metadata: dict[str, Any], subset: SubsetConfig) -> None:
    for key, entry in metadata.items():
        if not isinstance(entry, dict):
            raise ValueError(f"the entry {key!r} is {entry!r}, but must be an object with caption, tags, image_size")
        size = entry.get("image_size")
        numbers = isinstance(size, list) and len(size) == 2 and all(_is_side(n) for n in size)
        if size is not None and not numbers:
            raise ValueError(f"the image_size of {key!r} is {size!r}, but must be [width, height]")
        for name in ("caption", "tags"):
            text = entry.get(name)
            if text is not None and not (isinstance(text, str) and is_whole(text)):
                must = "a text of whole characters, and sd-scripts stops at it"
                raise ValueError(f"{name} of {key!r} is {text!r}, but must be {must}")
    relative = next((key for key in metadata if not os.path.isabs(key)), None)
    if relative is not None and subset.image_dir is None:
        raise ValueError(f"paths such as {relative!r} are relative, and the subset has no image_dir to join them to")


def _is_side(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _report_missing(entries: list[Entry], subset: SubsetConfig, reading: ReadContext) -> None:
    missing = [e for e in entries if not os.path.isfile(e.path)]
    if not missing:
        return
    keys = [e.key for e in missing]
    remedy = path_meant(missing[0].path)
    without_extension = all(not os.path.splitext(key)[1] for key in keys)
    if without_extension and Feature.STEMS not in reading.release:
        remedy = f"the keys have no extension; sd-scripts needs the whole file name before {Feature.STEMS.since}"
    message = f"{len(missing)} of {len(entries)} images in {quoted(subset.metadata_file)} do not exist ({some(keys)})"
    reading.findings.error("missing-image", subset.place, message, remedy, keys)
