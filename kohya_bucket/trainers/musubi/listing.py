"""The items that a dataset of musubi-tuner names: files of a folder, or the lines of a list.

Source: kohya-ss/musubi-tuner, `glob_images`, `glob_videos` and the classes of `dataset/datasources.py`.
"""

from __future__ import annotations

import codecs
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.formats import VIDEO_EXTENSIONS, format_of_extension, frame_endings, is_listed
from kohya_bucket.inputs import MAX_TABLE_BYTES, open_input
from kohya_bucket.texts import counted, is_whole, parse_json, read_text, some
from kohya_bucket.trainers.door.captions import check_blank, check_broken, check_marks, check_missing, read_captions
from kohya_bucket.trainers.door.file_findings import check_ignored, note_subfolders
from kohya_bucket.trainers.door.file_names import check_names
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.musubi.architectures import ANY, Family
from kohya_bucket.trainers.musubi.checkout import known_checkout, lists_are_searched_beside_them
from kohya_bucket.trainers.musubi.controls import controls_in_folder, controls_in_rows, paths_in
from kohya_bucket.trainers.musubi.items import LEFT_OUT, ending_in, images_of, names_in
from kohya_bucket.trainers.musubi.keys import CommonKeys, ImageKeys

_VIDEO_ENDINGS = frozenset(ending for one in VIDEO_EXTENSIONS for ending in (one, one.upper()))


class Listed(NamedTuple):
    """The images, or the clips and folders of frames, that a dataset names, in musubi-tuner's order, and the control
    images or clips that it reads with each.
    """

    paths: list[str]
    controls: list[list[str]]


def list_items(
    keys: CommonKeys, place: str, findings: Findings, model: Family = ANY, folders: Collection[str] = ()
) -> Listed:
    """What a dataset names. What is wrong with it is added to the findings.

    `folders` are all that its config names, whose files are no oversight where they lie in another of them.
    """
    before = len(findings)
    if keys.directory is not None:
        paths = _in_folder(keys, keys.directory, place, findings)
        below = _in_subfolders(keys.directory, frame_endings() if keys.what == "image" else _VIDEO_ENDINGS, folders)
        note_subfolders(below, "musubi-tuner", place, "[[datasets]]", findings, keys.what)
        images = _images_in(keys.control_directory) if keys.control_directory and keys.what == "image" else []
        controls = controls_in_folder(keys, paths, images, place, findings, model)
        _check_captions(keys, paths, place, findings)
    elif keys.jsonl_file is not None:
        beside = keys.what == "clip" and lists_are_searched_beside_them(known_checkout(model.trainer))
        rows = _once(_in_list(keys.jsonl_file, place, keys.what, findings, beside), keys, model, place, findings)
        paths = [path for path, _ in rows]
        controls = controls_in_rows(keys, rows, place, findings, model)
        captions = [(path, row["caption"]) for path, row in rows]
        check_marks(captions, place, findings, keys.jsonl_file)
        check_blank(captions, len(rows), place, findings)
    else:
        return Listed([], [])
    if not paths:
        source = keys.directory or keys.jsonl_file
        remedy = "see the other findings" if len(findings) > before else "it is empty"
        findings.error("no-items", place, f"no {keys.what} is left of {source!r}", remedy)
    stems = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    times = Counter(stems)
    if shared := [path for path, stem in zip(paths, stems, strict=True) if times[stem] > 1]:
        message = f"{counted(len(shared), keys.what)} share names except for folder and ending, and so their captions' "
        remedy = "rename them, or cache and train with the plan"
        findings.warning("shared-names", place, f"{message}caches: {some(shared)}", remedy, shared)
    return Listed(paths, controls)


def _in_folder(keys: CommonKeys, folder: str, place: str, findings: Findings) -> list[str]:
    try:
        names = names_in(folder)
    except (OSError, ValueError) as error:  # the latter of a name that no folder can have
        why = "is not a folder" if isinstance(error, NotADirectoryError) else "cannot be listed"
        why = "does not exist" if isinstance(error, FileNotFoundError) else why
        findings.error("missing-folder", place, f"{quoted(folder)} {why}", path_meant(folder))
        return []
    if keys.what == "image":
        listed = set(ending_in(names, folder, frame_endings()))
        images = [os.path.join(folder, name) for name in names if format_of_extension(os.path.splitext(name)[1])]
        check_ignored([path for path in images if path not in listed], "musubi-tuner", place, findings)
        check_names([os.path.join(folder, name) for name in names], "musubi-tuner", place, findings)
        of_others = isinstance(keys, ImageKeys) and keys.multiple_target
        kept, bare = images_of(folder, keys.caption_extension, of_others=of_others)
        if bare:
            severity = Severity.WARNING if kept else Severity.ERROR
            _check_missing(keys, bare, len(kept) + len(bare), LEFT_OUT, place, findings, severity)
        return kept
    paths, ending = ending_in(names, folder, _VIDEO_ENDINGS), keys.caption_extension
    bare = [path for path in paths if ending and not os.path.exists(os.path.splitext(path)[0] + ending)]
    if bare:
        _check_missing(keys, bare, len(paths), "musubi-tuner stops", place, findings, Severity.ERROR)
    return paths


def _check_missing(
    keys: CommonKeys, bare: Sequence[str], total: int, then: str, place: str, findings: Findings, severity: Severity
) -> None:
    ending = keys.caption_extension or ""
    check_missing(bare, total, ending, then, place, findings, severity=severity, what=keys.what)


def _in_subfolders(folder: str, endings: Collection[str], but: Collection[str]) -> list[str]:
    """What lies in the folders in `folder`, without those in `but`."""
    below = []
    _, inner, _ = next(os.walk(folder if os.path.isdir(folder) else ""), ("", [], []))
    for path in (os.path.join(folder, name) for name in sorted(filter(is_listed, inner))):
        if os.path.realpath(path) not in but:
            with suppress(OSError):
                below += ending_in(names_in(path), path, endings)
    return below


def _images_in(folder: str) -> list[str]:
    return ending_in(names_in(folder), folder, frame_endings()) if os.path.isdir(folder) else []


def _in_list(file: str, place: str, what: str, findings: Findings, beside: bool) -> list[tuple[str, Mapping[str, Any]]]:
    """(path, line) of the items in a list."""
    try:
        with open_input(file) as opened:
            marked = opened.read(3) == codecs.BOM_UTF8
        text = read_text(file, MAX_TABLE_BYTES)
    except (OSError, ConfigError) as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        findings.error("missing-list", place, f"{quoted(file)} {why}", path_meant(file))
        return []
    if marked:
        message = f"{quoted(file)} starts with a byte order mark, at which musubi-tuner stops"
        findings.error("byte-order-mark", place, message, "save it as 'UTF-8', not 'UTF-8 with BOM'", (file,))
    rows = []
    for line, entry in _entries(file, text, place, findings, beside):
        try:
            row = parse_json(entry) if isinstance(entry, str) else entry
            path = _of_line(row, "video_path" if what == "clip" else "image_path")
        except ValueError as error:
            message = f"{line} of {quoted(file)}, at which musubi-tuner stops: {str(error).removeprefix('line 1, ')}"
            findings.error("bad-line", place, message, 'one object on each line: {"image_path": "…", "caption": "…"}')
            continue
        if beside:
            paths = {key: _beside(row[key], file) for key in ("video_path", "control_path") if key in row}
            row, path = {**row, **paths}, paths["video_path"]
        rows.append((path, row))
    return rows


def _once(
    rows: list[tuple[str, Mapping[str, Any]]], keys: CommonKeys, model: Family, place: str, findings: Findings
) -> list[tuple[str, Mapping[str, Any]]]:
    """Without lines that name the same files and caption as an earlier one: they are one item."""
    first: dict[str, int] = {}
    for number, (path, row) in enumerate(rows):
        counts = {"caption"} | (row.keys() if model.per_clip else set())
        counts |= (
            {key for key in row if key.startswith("image_path_")} if getattr(keys, "multiple_target", False) else set()
        )
        said = {key: row[key] for key in sorted(counts) if "control_path" not in key and not key.endswith("_path")}
        files = [
            os.path.abspath(one) if isinstance(one, str) else one for one in (path, *paths_in(row, keys.what == "clip"))
        ]
        first.setdefault(json.dumps([files, said]), number)
    again = [rows[number][0] for number in sorted({*range(len(rows))} - {*first.values()})]
    if again:
        message = f"{counted(len(again), 'line')} that name the same files and caption as an earlier one, and are one "
        message += f"item with it ({some(again, 2)})"
        findings.warning("same-line", place, message, "to train an item more often, set num_repeats", again)
    return [rows[number] for number in first.values()]


def _entries(file: str, text: str, place: str, findings: Findings, blank: bool) -> list[tuple[str, Any]]:
    """(place, line or entry) of each; those of one JSON text in a file of lines are one finding.

    `blank`: blank lines are passed over.
    """
    lines = text.split("\n")
    numbered = [(f"line {number}", line) for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1)]
    if text.lstrip()[:1] == "[" or "\n" in text.strip():
        with suppress(ValueError):
            whole = parse_json(text)
            entries = whole if isinstance(whole, list) else [whole]
            held = f"a list of {counted(len(entries), 'value')}" if isinstance(whole, list) else "one object"
            message = f"{quoted(file)} holds one JSON text, {held}, but musubi-tuner reads one object a line, and stops"
            remedy = "write each entry on a line of its own, without the brackets and commas around it"
            findings.error("not-lines", place, message, remedy, (file,))
            return [(f"entry {number}", entry) for number, entry in enumerate(entries, 1)]
    return [one for one in numbered if not blank or one[1].strip()]


def _beside(path: Any, file: str) -> Any:
    """A path in a list, or the one beside the list where there is only that."""
    if not isinstance(path, str) or not path:
        return path
    other = os.path.join(os.path.dirname(os.path.abspath(file)), path)
    return other if not os.path.exists(path) and os.path.exists(other) else path


def _check_captions(keys: CommonKeys, paths: Sequence[str], place: str, findings: Findings) -> None:
    if not keys.caption_extension:
        return
    files = [os.path.splitext(path)[0] + keys.caption_extension for path in paths]
    texts, broken = read_captions(files)
    check_broken(broken, "musubi-tuner", place, findings)
    captions = list(zip(files, texts, strict=True))
    check_marks(captions, place, findings)
    check_blank(captions, len(paths), place, findings)


def _of_line(entry: Any, key: str) -> str:
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    path = entry.get(key, entry.get(f"{key}_0") if key == "image_path" else None)
    if not isinstance(path, str):
        raise ValueError(f"it has no text {key!r}")
    if not isinstance(entry.get("caption"), str):
        raise ValueError("it has no text 'caption'")
    if not is_whole(entry["caption"]):
        raise ValueError("its caption has half a character, which no tokenizer and no cache takes")
    for name in entry:
        if name.startswith("control_path_") and not name.rpartition("_")[2].isdigit():
            raise ValueError(f"its key {name!r} ends in no number")
    return path
