"""The items that a dataset's config names, the files that they are made from, and the names of their caches."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.checks import digest
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.formats import frame_endings, is_listed
from kohya_bucket.latents.fingerprint import Identity, source_identity
from kohya_bucket.trainers.musubi.architectures import ANY, ARCHITECTURES
from kohya_bucket.trainers.musubi.keys import SOURCES
from kohya_bucket.trainers.musubi.objects import CachedDataset

_SIDE = r"0*([1-9]\d{0,8})"  # of an image
_CLIP = re.compile(r"_(\d{5,})-(\d{3,})$")
_CLIP_OF_FILE = re.compile(r"_(\d{5,})-(\d{3,})(?:-(\d{4,}))?$")


@dataclass(frozen=True)
class CacheName:
    """What the name of a file with latents says.

    Attributes:
        stem: the item's.
        size: (width, height) of the image, or of a clip's resized frames.
        clip: first frame and number of frames; None for images.
        section: which part of a clip it is, where it is in several files.
    """

    path: str
    stem: str
    size: tuple[int, int]
    clip: tuple[int, int] | None = None
    section: int | None = None

    @classmethod
    def from_path(cls, path: str, family: str, *, clips: bool) -> CacheName | None:
        """What a path says; None where musubi-tuner could not read it, or no image has that size."""
        name = os.path.basename(path)
        match = re.fullmatch(rf"(.*)_{_SIDE}x{_SIDE}_{re.escape(family)}\.safetensors", name, re.DOTALL)
        if match is None:
            return None
        stem, size = match[1], (int(match[2]), int(match[3]))
        part = _CLIP_OF_FILE.search(stem) if clips else None
        if part is None:
            return None if clips else cls(path, stem, size)
        section = None if part[3] is None else int(part[3])
        return cls(path, stem[: part.start()], size, (int(part[1]), int(part[2])), section)


def clip_of_text(name: str, family: str) -> tuple[str, tuple[int, int]] | None:
    """(stem, clip) of a file with a clip's text outputs; None for other files."""
    body = name.removesuffix(f"_{family}_te.safetensors")
    match = _CLIP.search(body)
    return None if match is None or body == name else (body[: match.start()], (int(match[1]), int(match[2])))


def foreign_names(folder: str, family: str, *, clips: bool) -> list[str]:
    """Files that musubi-tuner takes for caches of a family, in whose names it finds no size, or of clips no frames.

    It ends with an error at the first. Source: `prepare_for_training` of its datasets.
    """
    ending, frames = f"_{family}.safetensors", r"\d+-\d+(?:-[^_]*)?_" if clips else ""
    wanted = re.compile(rf"(?:.*_)?{frames}\d+x\d+{re.escape(ending)}", re.DOTALL)
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(n for n in names if n.endswith(ending) and not n.startswith(".") and wanted.fullmatch(n) is None)


def item_stem(key: str) -> str:
    """What the names of an item's files begin with in musubi-tuner: the file's name without its extension."""
    return os.path.splitext(os.path.basename(key))[0]


def without_clip(key: str) -> tuple[str, tuple[int, int] | None]:
    """(the video that a clip is of, its first frame and number of frames)."""
    body, extension = os.path.splitext(key)
    match = _CLIP.search(body)
    return (key, None) if match is None else (body[: match.start()] + extension, (int(match[1]), int(match[2])))


def stems_of(items: Sequence[tuple[str, str | None, Sequence[str]]], folder: str) -> list[str]:
    """A stem for each item, all different, in any case where case does not count.

    An item keeps the one that musubi-tuner gives it, unless another item of the dataset has that too. Then all of
    them get a part of a hash: a further item changes no stem but those of items that it shares one with.

    Args:
        items: file, the caption where items of one file are told apart by it, and the further files where items of one
            file and caption are told apart by these.
        folder: paths count from there, so that a dataset that is moved as a whole keeps its names.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for i, (key, *_) in enumerate(items):
        groups[item_stem(key).casefold()].append(i)
    stems = [item_stem(key) for key, *_ in items]
    for shared in groups.values():
        if len(shared) > 1:
            for i in shared:
                key, caption, further = items[i]
                told = [_from(folder, key), caption or "", *(_from(folder, path) for path in further)]
                stems[i] += f"-{digest(chr(0).join(told), size=6)}"
    return stems


def _from(folder: str, path: str) -> str:
    with suppress(ValueError):  # another drive
        path = os.path.relpath(path, folder)
    return path.replace(os.sep, "/")


@dataclass(frozen=True)
class Source:
    """One image or video that the config names.

    Attributes:
        number: its place in the dataset's own list.
        key: its path, as the dataset names it.
        caption: None where the dataset reads it from a file when it is asked.
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

    @property
    def item_key(self) -> str:
        """What musubi-tuner is told that its path is: it names caches by that, and tells items apart by it alone."""
        return os.path.join(os.path.dirname(self.key), self.stem + os.path.splitext(self.key)[1])


class SourceTable:
    """All of them; two lines of a list that name the same files and caption are one.

    Attributes:
        sources: in the dataset's order.
        at: by their place in the dataset's list; a line that says what an earlier one does has none.

    Raises:
        ConfigError: a line names no file or no caption.
    """

    def __init__(self, dataset: CachedDataset) -> None:
        family = ARCHITECTURES.get(dataset.architecture, ANY)
        rows = list(_listed(dataset.datasource, family.per_clip))
        # One file may be written in several ways. Of lines that say the same the first counts.
        lines = [(tuple(map(os.path.abspath, files)), caption, further) for _, caption, files, further in rows]
        unique = sorted({line: number for number, line in reversed(list(enumerate(lines)))}.values())
        lines_of_file = Counter(lines[number][0][0] for number in unique)
        lines_of_caption = Counter((lines[number][0][0], lines[number][1]) for number in unique)
        # Items of one file are told apart by their captions; those of one caption too by all else in their lines.
        told_apart = []
        for number in unique:
            (file, *others), caption, further = lines[number]
            text = caption if lines_of_file[file] > 1 else None
            shared = lines_of_caption[file, caption] > 1
            told_apart.append((file, f"{text}{further}", others) if shared else (file, text, ()))
        self.sources = [
            Source(number, *rows[number][:2], stem, *rows[number][2:])
            for number, stem in zip(unique, stems_of(told_apart, folder_of(dataset)), strict=True)
        ]
        self.at = {source.number: source for source in self.sources}
        self._of_item = {source.item_key: source for source in self.sources}

    def of_item(self, item: Any, *, clips: bool) -> Source | None:
        """The source that an item of musubi-tuner is of."""
        of_clip = clips and item.frame_count is not None  # captions are of videos
        return self._of_item.get(without_clip(item.item_key)[0] if of_clip else item.item_key)


def identity(path: str, *, content: bool = False) -> Identity:
    """What a file is known by; of a folder, what all files in it are.

    Raises:
        OSError: it is gone.
    """
    if not os.path.isdir(path):
        return source_identity(path, content=content)
    of_all = [source_identity(file, content=content) for file in sorted(Path(path).iterdir()) if file.is_file()]
    hashes = "".join(one[2] for one in of_all)
    return sum(one[0] for one in of_all), max((one[1] for one in of_all), default=0), hashes


def _listed(datasource: Any, per_clip: bool) -> Iterator[tuple[str, str | None, tuple[str, ...], str]]:
    """(path, caption, files, further keys) of each item of a directory or of a list, as `Source` has them."""
    with_sound = per_clip and hasattr(datasource, "get_video_data")
    paths = getattr(datasource, "image_paths", getattr(datasource, "video_paths", None))
    if paths is not None:  # a directory, which has its captions in files
        sounds = _sounds(paths) if with_sound else {}
        targets, controls = getattr(datasource, "target_paths", {}), getattr(datasource, "control_paths", {})
        for path in paths:
            control = controls.get(path, ())
            further = (control,) if isinstance(control, str) else tuple(control)
            yield path, None, (path, *targets.get(path, ()), *further, *sounds.get(path, ())), ""
        return
    several = bool(getattr(datasource, "multiple_target", False))
    file = str(getattr(datasource, "image_jsonl_file", None) or getattr(datasource, "video_jsonl_file", "the list"))
    paths = [row.get("video_path") or row.get("image_path", row.get("image_path_0")) for row in datasource.data]
    sounds = _sounds([path for path in paths if isinstance(path, str)]) if with_sound else {}
    for number, (path, row) in enumerate(zip(paths, datasource.data, strict=True), 1):
        if not isinstance(path, str) or "caption" not in row:
            lacks = "caption" if isinstance(path, str) else "path of an image or a video"
            raise ConfigError(f"line {number} of {file} has no {lacks}: add it, or remove the line")
        numbered = [*(_numbered(row, "image_path_", 1) if several else ()), *_numbered(row, "control_path_", 0)]
        single = [row["control_path"]] if row.get("control_path") else []
        if odd := [one for one in (*numbered, *single) if not isinstance(one, str)]:
            raise ConfigError(f"line {number} of {file} names {odd[0]!r}, but one path in quotes is needed")
        # What else a family of clips caches of a line: further keys, and the sound that one names or lies beside.
        more = {key: row[key] for key in sorted(row) if _KNOWN_KEYS.fullmatch(key) is None} if per_clip else {}
        named = row.get("audio_path") if with_sound else None
        sound = [named] if named else sounds.get(path, ())
        files = (path, *numbered, *single, *sound, *_files_in(more, file))
        yield path, row["caption"], files, json.dumps(more) if more else ""


_KNOWN_KEYS = re.compile(r"(image_path|video_path|control_path)(_\d+)?|caption|audio_path")
_SOUND = {".aac", ".flac", ".m4a", ".mp3", ".ogg", ".opus", ".wav"}


def _sounds(videos: Sequence[str]) -> dict[str, list[str]]:
    """{video: files with its sound, beside it}."""
    beside: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for folder in {Path(video).parent for video in videos}:
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.suffix.lower() in _SOUND:
                beside[folder, file.stem].append(str(file))
    return {video: beside.get((Path(video).parent, Path(video).stem), []) for video in videos}


def _files_in(value: Any, listed_in: str) -> Iterator[str]:
    """Files that further keys of a line name, from here or from the folder of the list."""
    if isinstance(value, str):
        places = (value, os.path.join(os.path.dirname(os.path.abspath(listed_in)), value))
        yield from [path for path in places if os.path.isfile(path)][:1]
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _files_in(one, listed_in)


def _numbered(row: dict[str, Any], prefix: str, first: int) -> Iterator[str]:
    while f"{prefix}{first}" in row:
        yield row[f"{prefix}{first}"]
        first += 1


_tables: WeakKeyDictionary[Any, SourceTable] = WeakKeyDictionary()


def table_of(dataset: CachedDataset) -> SourceTable:
    """The one table of a dataset, whose list never changes."""
    return _tables.get(dataset) or _tables.setdefault(dataset, SourceTable(dataset))


def folder_of(dataset: Any) -> str:
    """Where a dataset's items lie, or the list of them."""
    named = {key: str(getattr(dataset, key)) for key in SOURCES if getattr(dataset, key, None)}
    folders = [path for key, path in named.items() if key.endswith("directory")]
    return (folders or [os.path.dirname(os.path.abspath(path)) for path in named.values()] or ["."])[0]


def images_of(folder: str, ending: str | None, *, of_others: bool = False) -> tuple[list[str], list[str]]:
    """The images of a folder that have a caption file, and those that have none, which musubi-tuner leaves out.

    `of_others`: what is called like an image with a caption and `_1`, `_2`, … is a further target of that.

    Raises:
        OSError: it cannot be listed.
    """
    names = names_in(folder)
    paths = ending_in(names, folder, frame_endings())
    if not ending:
        return paths, []
    ending = os.path.normcase(ending)
    captioned = {os.path.splitext(name)[0] for name in names if os.path.normcase(name).endswith(ending)}
    kept, bare = list[str](), list[str]()
    for path in paths:
        stem = os.path.splitext(os.path.basename(path))[0]
        if stem in captioned:
            kept.append(path)
        elif not (of_others and any(stem[:i] in captioned for i, sign in enumerate(stem) if sign == "_")):
            bare.append(path)
    return kept, bare


LEFT_OUT = "musubi-tuner leaves out what has none (before 0.3.0 it stops there)"
"""What becomes of images without a caption."""


def names_in(folder: str) -> list[str]:
    """The files and folders in a folder, without hidden ones, sorted."""
    return sorted(filter(is_listed, os.listdir(folder)))


def ending_in(names: Sequence[str], folder: str, endings: Collection[str]) -> list[str]:
    """As `glob` finds them: exact endings, but on Windows in any case."""
    plain = str.lower if os.name == "nt" else str
    wanted = {plain(one) for one in endings}
    return [os.path.join(folder, name) for name in names if plain(os.path.splitext(name)[1]) in wanted]
