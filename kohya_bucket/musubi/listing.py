"""The items that a data set of musubi-tuner names: files of a folder, or the lines of a list.

Source: kohya-ss/musubi-tuner, `glob_images`, `glob_videos` and the classes of `dataset/datasources.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection
from typing import Any

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.checks import path_meant
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.formats import VIDEO_EXTENSIONS, frame_endings, is_listed
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.musubi.architectures import ANY, Architecture
from kohya_bucket.musubi.checkout import known_checkout, lists_are_searched_beside_them
from kohya_bucket.musubi.keys import DatasetKeys
from kohya_bucket.texts import counted, parse_json, read_text, some

_VIDEO_ENDINGS = frozenset(ending for one in VIDEO_EXTENSIONS for ending in (one, one.upper()))


def list_items(keys: DatasetKeys, place: str, findings: Findings, model: Architecture = ANY) -> list[str]:
    """The images, or the clips and folders of frames, that are named, in musubi-tuner's order.

    What is wrong with them is added to the findings.
    """
    if keys.directory is not None:
        paths = _in_folder(keys, keys.directory, place, findings)
    elif keys.jsonl_file is not None:
        beside = keys.what == "clip" and lists_are_searched_beside_them(known_checkout(model.trainer))
        paths = _in_list(keys.jsonl_file, place, keys.what, findings, beside)
    else:
        return []
    if not paths:
        source = keys.directory or keys.jsonl_file
        findings.error("no-items", place, f"not one {keys.what} is left of {source!r}", "see the other findings")
    stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    times = Counter(stems)
    if shared := [path for path, stem in zip(paths, stems, strict=True) if times[stem] > 1]:
        message = f"{counted(len(shared), keys.what)} share names but for folder and ending, and so their captions' "
        remedy = "rename them, or cache and train with the plan"
        findings.warning("shared-names", place, f"{message}caches: {some(shared)}", remedy, shared)
    return paths


def _in_folder(keys: DatasetKeys, folder: str, place: str, findings: Findings) -> list[str]:
    try:
        names = sorted(filter(is_listed, os.listdir(folder)))
    except OSError as error:
        why = "is no folder" if isinstance(error, NotADirectoryError) else "cannot be listed"
        why = "does not exist" if isinstance(error, FileNotFoundError) else why
        findings.error("missing-folder", place, f"{folder!r} {why}", path_meant(folder))
        return []
    clips, ending = keys.what == "clip", keys.caption_extension
    endings: Collection[str] = _VIDEO_ENDINGS if clips else frame_endings()
    # as `glob` finds them: exact endings, but on Windows in any case
    plain = str.lower if os.name == "nt" else str
    wanted = {plain(one) for one in endings}
    paths = [os.path.join(folder, name) for name in names if plain(os.path.splitext(name)[1]) in wanted]
    if not ending:
        return paths
    remedy = f"write one to the same name with {ending}"
    if clips:
        bare = [path for path in paths if not os.path.exists(os.path.splitext(path)[0] + ending)]
        if bare:
            message = f"{counted(len(bare), 'clip')} without a caption, at which musubi-tuner stops: {some(bare)}"
            findings.error("no-caption", place, message, remedy, bare)
        return paths
    captioned = {os.path.splitext(name)[0] for name in names if name.endswith(ending)}
    kept = [path for path in paths if os.path.splitext(os.path.basename(path))[0] in captioned]
    if len(kept) < len(paths):
        bare = sorted(set(paths) - set(kept))
        message = f"{counted(len(bare), 'image')} without a caption, which musubi-tuner leaves out "
        message += f"(before 0.3.0 it stops there): {some(bare)}"
        findings.warning("no-caption", place, message, remedy, bare)
    return kept


def _in_list(file: str, place: str, what: str, findings: Findings, beside: bool) -> list[str]:
    try:
        lines = read_text(file, MAX_TABLE_BYTES).split("\n")
    except (OSError, ConfigError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        findings.error("missing-list", place, f"{file!r} {why}", path_meant(file))
        return []
    paths = []
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        if beside and not line.strip():
            continue
        try:
            path = _of_line(parse_json(line), "video_path" if what == "clip" else "image_path")
        except ValueError as error:
            message = f"line {number} of {file!r}, at which musubi-tuner stops: {error}"
            findings.error("bad-line", place, message, 'one object on each line: {"image_path": "…", "caption": "…"}')
            continue
        other = os.path.join(os.path.dirname(os.path.abspath(file)), path)
        paths.append(other if beside and not os.path.exists(path) and os.path.exists(other) else path)
    return paths


def _of_line(entry: Any, key: str) -> str:
    if not isinstance(entry, dict):
        raise ValueError("it is no object")
    path = entry.get(key, entry.get(f"{key}_0") if key == "image_path" else None)
    if not isinstance(path, str):
        raise ValueError(f"it has no text {key!r}")
    if not isinstance(entry.get("caption"), str):
        raise ValueError("it has no text 'caption'")
    for name in entry:
        if name.startswith("control_path_") and not name.rpartition("_")[2].isdigit():
            raise ValueError(f"its key {name!r} ends in no number")
    return path
