"""The items that a data set's config names, each with the files that its caches are made from."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.fingerprint import source_identity
from kohya_bucket.musubi.caching.families import FAMILIES
from kohya_bucket.musubi.caching.names import stems_of, without_clip
from kohya_bucket.musubi.objects import CachedDataset

__all__ = ["Identity", "Source", "SourceTable", "folder_of", "identity", "table_of"]

Identity = tuple[int, int, str]
"""Length in bytes, modification time in ns, and hash of the content ("" where it is not asked for)."""


@dataclass(frozen=True)
class Source:
    """One image or video that the config names.

    Attributes:
        number: its place in the data set's own list.
        key: its path, as the data set names it.
        caption: None where the data set reads it from a file when it is asked.
        stem: what the names of its caches begin with.
        files: the image or video, further targets, then control images or videos, sound and what further keys name.
        further: further keys of its line in a list, as JSON, where its family uses them.
    """

    number: int
    key: str
    caption: str | None
    stem: str
    files: tuple[str, ...]
    further: str = ""

    @property
    def name(self) -> str:
        return os.path.basename(self.key)


class SourceTable:
    """All of them; two lines of a list that say the same are one.

    Raises:
        ConfigError: a line names no file or no caption.
    """

    def __init__(self, dataset: CachedDataset) -> None:
        per_clip = dataset.architecture in FAMILIES and FAMILIES[dataset.architecture].per_clip
        found = list(_listed(dataset.datasource, per_clip))
        times = Counter(os.path.abspath(key) for key, *_ in found)  # one file may be written in several ways
        told_apart = [(key, caption if times[os.path.abspath(key)] > 1 else None) for key, caption, *_ in found]
        first = {item: number for number, item in reversed(list(enumerate(told_apart)))}
        unique = sorted(first.values())
        stems = stems_of([told_apart[number] for number in unique], folder_of(dataset))
        self.sources = [
            Source(number, *found[number][:2], stem, *found[number][2:])
            for number, stem in zip(unique, stems, strict=True)
        ]
        self._at = {source.number: source for source in self.sources}
        self._of_item = {told_apart[source.number]: source for source in self.sources}

    def at(self, number: int) -> Source | None:
        """The source at a place of the data set's list; None for one that an earlier place has."""
        return self._at.get(number)

    def of_item(self, item: Any, *, clips: bool) -> Source | None:
        """The source that an item of musubi-tuner is of."""
        of_clip = clips and item.frame_count is not None  # captions are of videos
        key = without_clip(item.item_key)[0] if of_clip else item.item_key
        return self._of_item.get((key, None)) or self._of_item.get((key, item.caption))


def identity(path: str, *, content: bool = False) -> Identity:
    """What a file is known by; of a folder, what all files in it are.

    Raises:
        OSError: it is gone.
    """
    if not os.path.isdir(path):
        return source_identity(path, content=content)
    of_all = [source_identity(file, content=content) for file in sorted(Path(path).iterdir()) if file.is_file()]
    hashes = "".join(known[2] for known in of_all)
    return sum(known[0] for known in of_all), max((known[1] for known in of_all), default=0), hashes


def _listed(datasource: Any, per_clip: bool) -> Iterator[tuple[str, str | None, tuple[str, ...], str]]:
    """(path, caption, files, further keys) of a directory or of a list."""
    of_clips = hasattr(datasource, "get_video_data")
    paths = getattr(datasource, "image_paths", None)
    paths = getattr(datasource, "video_paths", None) if paths is None else paths
    controls = getattr(datasource, "control_paths", {})
    if paths is not None:
        targets = getattr(datasource, "target_paths", {})
        for path in paths:
            control = controls.get(path, ())
            further = (control,) if isinstance(control, str) else tuple(control)
            sound = _sound(path) if per_clip and of_clips else ()
            yield path, None, (path, *targets.get(path, ()), *further, *sound), ""
        return
    several = bool(getattr(datasource, "multiple_target", False))
    for number, row in enumerate(datasource.data, 1):
        path = row.get("video_path") or row.get("image_path", row.get("image_path_0"))
        if not isinstance(path, str) or "caption" not in row:
            lacks = "caption" if isinstance(path, str) else "path of an image or a video"
            raise ConfigError(f"line {number} of {_list_of(datasource)} has no {lacks}: add it, or remove the line")
        numbered = [*(_numbered(row, "image_path_", 1) if several else ()), *_numbered(row, "control_path_", 0)]
        single = [row["control_path"]] if row.get("control_path") else []
        more = {key: row[key] for key in sorted(row) if _KNOWN_KEYS.fullmatch(key) is None} if per_clip else {}
        sound = [row["audio_path"]] if row.get("audio_path") else _sound(path)
        named = (*(sound if per_clip and of_clips else ()), *_files_in(more, _list_of(datasource)))
        yield path, row["caption"], (path, *numbered, *single, *named), json.dumps(more) if more else ""


_KNOWN_KEYS = re.compile(r"(image_path|video_path|control_path)(_\d+)?|caption|audio_path")
_SOUND = {".aac", ".flac", ".m4a", ".mp3", ".ogg", ".opus", ".wav"}


def _sound(video: str) -> list[str]:
    """Files with a video's sound, beside it."""
    folder = Path(video).parent
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(str(file) for file in files if file.stem == Path(video).stem and file.suffix.lower() in _SOUND)


def _files_in(value: Any, listed_in: str) -> Iterator[str]:
    """Files that further keys of a line name, from here or from the folder of the list."""
    if isinstance(value, str):
        places = (value, os.path.join(os.path.dirname(os.path.abspath(listed_in)), value))
        yield from [path for path in places if os.path.isfile(path)][:1]
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _files_in(one, listed_in)


def _list_of(datasource: Any) -> str:
    return str(getattr(datasource, "image_jsonl_file", None) or getattr(datasource, "video_jsonl_file", "the list"))


def _numbered(row: dict[str, Any], prefix: str, first: int) -> Iterator[str]:
    while f"{prefix}{first}" in row:
        yield row[f"{prefix}{first}"]
        first += 1


_tables: WeakKeyDictionary[Any, SourceTable] = WeakKeyDictionary()


def table_of(dataset: CachedDataset) -> SourceTable:
    """The one table of a data set, whose list never changes."""
    if dataset not in _tables:
        _tables[dataset] = SourceTable(dataset)
    return _tables[dataset]


def folder_of(dataset: Any) -> str:
    """Where a data set's items lie, or the list of them."""
    for name in ("image_directory", "video_directory"):
        if getattr(dataset, name, None):
            return str(getattr(dataset, name))
    for name in ("image_jsonl_file", "video_jsonl_file"):
        if getattr(dataset, name, None):
            return os.path.dirname(os.path.abspath(str(getattr(dataset, name))))
    return "."
