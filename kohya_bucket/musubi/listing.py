"""The items that a data set of musubi-tuner names: files of a folder, or the lines of a list.

Source: kohya-ss/musubi-tuner, `glob_images`, `glob_videos` and the classes of `dataset/datasources.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.formats import VIDEO_EXTENSIONS, frame_endings
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.checkout import known_checkout, lists_are_searched_beside_them
from kohya_bucket.musubi.config import ClipKeys, DatasetKeys
from kohya_bucket.texts import counted, parse_json, read_text, some

__all__ = ["Listed", "list_items"]

_VIDEO_ENDINGS = frozenset(ending for one in VIDEO_EXTENSIONS for ending in (one, one.upper()))
_CONTROL = "control_path"


@dataclass(frozen=True)
class Listed:
    """N items.

    Attributes:
        paths: [N] an image, a clip, or a folder of images that are the frames of one.
        controls: [N] the control images or the control clip of each; nothing where there are none.
    """

    paths: Sequence[str] = ()
    controls: Sequence[tuple[str, ...]] = ()


def list_items(keys: DatasetKeys, place: str, findings: Findings, architecture: Architecture | None = None) -> Listed:
    """What is named, in musubi-tuner's order; what is wrong with it is added to the findings."""
    what = "clip" if isinstance(keys, ClipKeys) else "image"
    if keys.directory is not None:
        listed = _in_folder(keys, keys.directory, place, what, findings)
    elif keys.jsonl_file is not None:
        package = known_checkout(architecture.trainer if architecture else None)
        beside = what == "clip" and lists_are_searched_beside_them(package)
        listed = _in_list(keys.jsonl_file, place, what, findings, beside)
    else:
        return Listed()
    if not listed.paths:
        source = keys.directory or keys.jsonl_file
        findings.error("no-items", place, f"not one {what} is left of {source!r}", "see the other findings")
    _check_names(listed.paths, place, what, findings)
    return listed


def _in_folder(keys: DatasetKeys, folder: str, place: str, what: str, findings: Findings) -> Listed:
    names = _names(folder, place, findings)
    paths = _of_endings(folder, names, _VIDEO_ENDINGS if what == "clip" else frame_endings())
    ending = keys.caption_extension or ""
    captioned = {os.path.splitext(name)[0] for name in names if ending and name.endswith(ending)}
    bare = [path for path in paths if os.path.splitext(os.path.basename(path))[0] not in captioned]
    if what == "clip":
        bare = [path for path in paths if ending and not os.path.exists(os.path.splitext(path)[0] + ending)]
        if bare:
            message = f"{counted(len(bare), 'clip')} without a caption, at which musubi-tuner stops: {some(bare)}"
            findings.error("no-caption", place, message, f"write one to the same name with {ending}", bare)
        return Listed(paths)
    if ending and bare:
        paths = [path for path in paths if path not in set(bare)]
        message = f"{counted(len(bare), 'image')} without a caption, which musubi-tuner leaves out "
        message += f"(before 0.3.0 it stops there): {some(bare)}"
        findings.warning("no-caption", place, message, f"write one to the same name with {ending}", bare)
    return Listed(paths)


def _names(folder: str, place: str, findings: Findings) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        why = "is no folder" if isinstance(error, NotADirectoryError) else "cannot be listed"
        why = "does not exist" if isinstance(error, FileNotFoundError) else why
        findings.error("missing-folder", place, f"{folder!r} {why}", "correct the path")
        return []


def _of_endings(folder: str, names: Sequence[str], endings: Collection[str]) -> list[str]:
    """The paths that `glob` would find: exact endings, but on Windows in any case."""
    if os.name == "nt":
        endings = {ending.lower() for ending in endings}
        names = [name for name in names if os.path.splitext(name)[1].lower() in endings]
        return [os.path.join(folder, name) for name in names]
    return [os.path.join(folder, name) for name in names if os.path.splitext(name)[1] in endings]


def _in_list(file: str, place: str, what: str, findings: Findings, beside: bool) -> Listed:
    try:
        lines = read_text(file, None).split("\n")
    except (OSError, ConfigError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        findings.error("missing-list", place, f"{file!r} {why}", "correct the path")
        return Listed()
    paths, controls = [], []
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        if beside and not line.strip():
            continue
        try:
            path, control = _of_line(parse_json(line), "video_path" if what == "clip" else "image_path")
        except ValueError as error:
            message = f"line {number} of {file!r}, at which musubi-tuner stops: {error}"
            findings.error("bad-line", place, message, 'one object on each line: {"image_path": "…", "caption": "…"}')
            continue
        paths.append(_found(path, file) if beside else path)
        controls.append(control)
    return Listed(paths, controls if any(controls) else ())


def _found(path: str, file: str) -> str:
    """A path, which may count from the folder of the list where it names nothing from here."""
    other = os.path.join(os.path.dirname(os.path.abspath(file)), path)
    return other if not os.path.exists(path) and os.path.exists(other) else path


def _of_line(entry: Any, key: str) -> tuple[str, tuple[str, ...]]:
    """The item, and its control images in the order of their numbers."""
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    path = entry.get(key, entry.get(f"{key}_0") if key == "image_path" else None)
    if not isinstance(path, str):
        raise ValueError(f"it has no text {key!r}")
    if not isinstance(entry.get("caption"), str):
        raise ValueError("it has no text 'caption'")
    numbered = [name for name in entry if name.startswith(f"{_CONTROL}_")]
    numbered.sort(key=lambda name: int(name.rpartition("_")[2]))
    named = [_CONTROL] * (_CONTROL in entry) + numbered
    return path, tuple(str(entry[name]) for name in named if entry[name])


def _check_names(paths: Sequence[str], place: str, what: str, findings: Findings) -> None:
    stems = Counter(os.path.splitext(os.path.basename(path))[0] for path in paths)
    shared = [path for path in paths if stems[os.path.splitext(os.path.basename(path))[0]] > 1]
    if shared:
        message = f"{counted(len(shared), what)} share names but for folder and ending, and so their captions' caches"
        findings.warning(
            "shared-names", place, f"{message}: {some(shared)}", "rename them, or cache and train with the plan", shared
        )
