"""Caption files: which images have one, and what is wrong with them.

Source: `read_caption` in sd-scripts' `DreamBoothDataset`: `<image without extension><caption_extension>`, or the
same without the last four `_` parts of the path (face positions); the first line counts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.config.arguments import DEFAULTS
from kohya_bucket.sdscripts.config.model import SubsetConfig
from kohya_bucket.texts import counted, some

__all__ = ["caption_of", "check_captions", "check_stems"]

_USUAL = (".txt", ".caption", ".tags", ".text")


def check_captions(images: Sequence[str], names: frozenset[str], subset: SubsetConfig, findings: Findings) -> None:
    """Find images without caption, captions under another extension, empty and undecodable files.

    Args:
        images: those of the subset.
        names: of everything in their folder.
    """
    extension = subset.caption_extension
    missing: list[str] = []
    empty: list[str] = []
    blank: list[str] = []
    foreign: list[str] = []
    elsewhere: Counter[str] = Counter()
    for path in images:
        stem = os.path.splitext(path)[0]
        caption = _caption_file(stem, extension, names)
        if caption is None:
            missing.append(path)
            name = os.path.basename(stem)
            elsewhere.update(e for e in _USUAL if e != extension and name + e in names)
            continue
        problem = _problem(caption, subset.enable_wildcard)
        if problem is not None:
            {"empty": empty, "blank": blank, "foreign": foreign}[problem].append(caption)
    where = subset.place
    if empty:
        message = f"{_files(len(empty), 'caption file')} empty, which makes sd-scripts stop ({some(empty)})"
        findings.error("empty-caption", where, message, "write a caption or delete the file", empty)
    if foreign:
        message = f"{_files(len(foreign), 'caption file')} not UTF-8, which makes sd-scripts stop ({some(foreign)})"
        findings.error("caption-encoding", where, message, "save as UTF-8", foreign)
    if blank:
        message = f"the first line of {len(blank)} caption file{'s' * (len(blank) != 1)} is blank, and only it is used"
        findings.warning("blank-caption", where, f"{message} ({some(blank)})", "put the caption first", blank)
    if missing:
        _report_missing(missing, elsewhere, len(images), subset, findings)


def _report_missing(
    missing: Sequence[str], elsewhere: Counter[str], total: int, subset: SubsetConfig, findings: Findings
) -> None:
    extension = subset.caption_extension
    instead = f"the class tokens {subset.class_tokens!r}" if subset.class_tokens is not None else "an empty caption"
    if elsewhere:
        other, count = elsewhere.most_common(1)[0]
        default = " (the default)" if extension == DEFAULTS["caption_extension"] else ""
        findings.warning(
            "caption-extension",
            subset.place,
            f"caption_extension is {extension!r}{default}, but {count} of {total} images have their caption in "
            f"{other!r} files; {instead} would be trained",
            f"set caption_extension = {other!r}",
            missing,
        )
    elif len(missing) < total:
        findings.note(
            "missing-captions",
            subset.place,
            f"{len(missing)} of {total} images have no {extension!r} file; trained instead: {instead} "
            f"({some(missing)})",
            names=missing,
        )
    elif subset.class_tokens is None and not subset.is_reg:
        findings.warning(
            "no-captions",
            subset.place,
            f"none of {total} images has a {extension!r} file, and there are no class_tokens; "
            "an empty caption would be trained",
            "add captions or class_tokens",
            missing,
        )


def caption_of(image: str, subset: SubsetConfig) -> str | None:
    """The caption that sd-scripts trains of an image of a folder; None if it has none.

    The first line of its file, or with `enable_wildcard` all lines that are not blank; the class tokens where there
    is no file.

    Raises:
        ConfigError: a file that is not UTF-8, empty, or cannot be read: sd-scripts stops at it.
    """
    stem = os.path.splitext(image)[0]
    for file in _caption_files(stem, subset.caption_extension):
        if not os.path.isfile(file):
            continue
        try:
            with open(file, encoding="utf-8") as opened:
                lines = [line.strip() for line in opened]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 ({error}), which makes sd-scripts stop: save it as UTF-8") from None
        except OSError as error:
            raise ConfigError(f"{file}: the caption cannot be read: {error.strerror}") from None
        if not lines:
            raise ConfigError(f"{file} is empty, which makes sd-scripts stop: write a caption or delete the file")
        return "\n".join(filter(None, lines)) if subset.enable_wildcard else lines[0]
    return subset.class_tokens


def check_stems(images: Sequence[str], place: str, findings: Findings) -> None:
    """Name images that differ in nothing but the extension."""
    counts = Counter(os.path.splitext(path)[0] for path in images)
    shared = [path for path in images if counts[os.path.splitext(path)[0]] > 1]
    if shared:
        findings.warning(
            "same-stem",
            place,
            f"{counted(len(shared), 'image', 'differs', 'differ')} from another one by the extension only: they "
            "share one caption and, where "
            f"their sizes are equal, one latents cache file ({some(shared)})",
            "rename one of each",
            shared,
        )


def _caption_file(stem: str, extension: str, names: frozenset[str]) -> str | None:
    if os.path.basename(stem) + extension in names and os.path.isfile(stem + extension):
        return stem + extension
    return next((file for file in _caption_files(stem, extension)[1:] if os.path.isfile(file)), None)


def _caption_files(stem: str, extension: str) -> list[str]:
    """Where sd-scripts looks: beside the image, then without the four numbers of a face's position."""
    parts = stem.split("_")
    return [stem + extension, *(["_".join(parts[:-4]) + extension] if len(parts) >= 5 else [])]


def _problem(path: str, wildcard: bool) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            first = file.readline()
            rest = file.read()
    except UnicodeDecodeError:
        return "foreign"
    if not first:
        return "empty"
    return "blank" if not first.strip() and not (wildcard and rest.strip()) else None


def _files(count: int, what: str) -> str:
    return counted(count, what, "is", "are")
