"""Captions in files beside images: those at which a trainer stops, and those that it does not find."""

from __future__ import annotations

import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kohya_bucket.errors import ConfigError, TooLongError
from kohya_bucket.images.formats import format_of_extension
from kohya_bucket.images.scan import Job, ScanTask
from kohya_bucket.inputs import MAX_CAPTION_BYTES, read_small
from kohya_bucket.texts import counted, some, uncaptioned
from kohya_bucket.trainers.door.file_names import without_junk
from kohya_bucket.trainers.door.findings import Finding, Findings, Severity, fix_command

CODES = {
    "broken-caption", "caption-extension", "caption-lines", "caption-mark", "code-page", "missing-captions",
    "unicode-form",
}  # fmt: skip
"""Of findings about captions, which are files to change."""


def read_captions(files: Sequence[str], *, folders_stop: bool = True) -> tuple[list[str | None], dict[str, str]]:
    """The texts of N caption files, and {file: why} of those that trainers cannot read: "" of what is not UTF-8.

    A text is None where there is no file, or a broken one. `folders_stop`: a folder of that name is a broken one.
    """
    task = ScanTask(partial(_caption_row, folders_stop=folders_stop), [("text", "O"), ("why", "O")])
    rows = Job(task, files).run().rows
    broken = {file: why for file, why in zip(files, rows["why"].tolist(), strict=True) if why is not None}
    return rows["text"].tolist(), broken


def _caption_row(file: str, folders_stop: bool) -> tuple[str | None, str | None]:
    try:
        content = read_small(file, MAX_CAPTION_BYTES)
        if content is None:
            stops = folders_stop and os.path.exists(file)  # noqa: PTH110  (a NUL)
            return None, "it is not a file" if stops else None
        return content.decode("utf-8"), None
    except UnicodeDecodeError:
        return None, ""
    except TooLongError as error:
        return None, f"{error.strerror}: is it the right one?"
    except OSError as error:
        return None, f"it cannot be read ({error.strerror})"


def check_broken(broken: Mapping[str, str], trainer: str, place: str, findings: Findings) -> None:
    """Name caption files at which a trainer stops: those that `fix` writes as UTF-8, and the others."""
    if encoded := [file for file, why in broken.items() if not why]:
        message = f"{counted(len(encoded), 'caption file')} not in UTF-8, at which {trainer} stops ({some(encoded, 2)})"
        findings.error("broken-caption", place, message, f"{fix_command(encoded)} writes them as UTF-8", encoded)
    if others := {file: why for file, why in broken.items() if why}:
        first = some([f"{file}: {why}" for file, why in others.items()], 1)
        message = f"{counted(len(others), 'caption file')} at which {trainer} stops ({first})"
        remedy = "write a caption that can be read, or move the file away"
        findings.error("broken-caption", place, message, remedy, others)


def refuse_broken(files: Iterable[str], trainer: str) -> None:
    """Raise `ConfigError` where a trainer would stop at one of its caption files."""
    findings = Findings()
    check_broken(read_captions([*dict.fromkeys(files)])[1], trainer, "", findings)
    if len(findings):
        raise ConfigError("; ".join(finding.text for finding in findings))


MARK = "\ufeff"
"""What an editor's "UTF-8 with BOM" puts in front of a text; no trainer takes it away."""


def check_marks(
    captions: Iterable[tuple[str, str | None]], place: str, findings: Findings, listed_in: str | None = None
) -> None:
    """Name the captions that hold a byte order mark.

    Args:
        captions: (path of the image or of its caption file, text).
        listed_in: the file that holds them all; None where each is in a file of its own.
    """
    if marked := [name for name, text in captions if text is not None and MARK in text]:
        message = f"{counted(len(marked), 'caption')} with a byte order mark (U+FEFF), which is trained with the word "
        message += f"behind it ({some(marked, 2)})"
        remedy = f"{fix_command(marked)} takes it away" if listed_in is None else f"remove it from {listed_in}"
        findings.warning("caption-mark", place, message, remedy, marked)


def check_blank(
    captions: Iterable[tuple[str, str | None]], total: int, place: str, findings: Findings, then: str = ""
) -> None:
    """Name those of `total` images, or their caption files, whose caption is there and says nothing.

    Args:
        captions: (name, text), None where there is no caption.
        then: what is trained; by default an empty caption.
    """
    if blank := [name for name, text in captions if text is not None and not text.strip()]:
        message = uncaptioned(blank, total, then or "an empty one is trained")
        findings.of_share("missing-captions", place, message, "write them", blank, total)


def check_missing(
    bare: Sequence[str], total: int, ending: str, then: str, place: str, findings: Findings, *,
    key: str = "caption_extension", default: str = "", severity: Severity | None = None, what: str = "image",
) -> None:  # fmt: skip
    """Name those of `total` images that have no caption file, and the files beside them that are meant to be theirs.

    Args:
        bare: paths of these images, or clips.
        ending: of caption files, as `key` of the config says, or its `default`; no key: there is no other.
        then: what becomes of an image without one.
        severity: how bad it is that there is none; None: by the share. A note is of what is so on purpose, and left
            out where no image has one.
    """
    images = without_junk(bare)
    total, bare = total - len(bare) + len(images), images
    near, report = _near_captions(bare, ending), findings.error if severity is Severity.ERROR else findings.warning
    beside: dict[str, list[str]] = defaultdict(list)
    for path, file in near.items():
        stem = Path(path).stem
        looks_alike = unicodedata.normalize("NFC", file) == unicodedata.normalize("NFC", stem + ending)
        beside[ending if looks_alike else file.removeprefix(stem) if file.startswith(stem) else ""].append(path)
    for other, paths in beside.items():
        both = some([f"{Path(path).name!a} beside {near[path]!a}" for path in paths], 2)
        share = f"{len(paths):,} of {counted(total, what)} {'has' if len(paths) == 1 else 'have'}"
        if other == ending:
            message = f"{counted(len(paths), what, 'has', 'have')} a caption file whose name looks the same and is "
            message += f"written in another Unicode form (NFC or NFD), so that no trainer finds it ({both})"
            report("unicode-form", place, message, "rename the captions to the images' very names", paths)
            continue
        # What most images have is kept.
        change = f"set {key} = {other!r}" if key and len(paths) > total - len(bare) else f"rename them to {ending!r}"
        where = f"their caption in {other!r} files" if other else "a caption file whose name is written otherwise"
        said = f"{key or 'the ending'} is {ending!r}{' (the default)' if ending == default else ''}"
        message = f"{said}, but {share} {where} ({both}); {then}"
        report("caption-extension", place, message, change if other else "rename them alike", paths)
    missing = [path for path in bare if path not in near]
    if missing and not (severity is Severity.NOTE and len(missing) == total):
        message, remedy = uncaptioned(missing, total, then, f"{ending!r} file", what), "write them"
        if severity is None:
            findings.of_share("missing-captions", place, message, remedy, missing, total)
        else:
            findings.add([Finding(severity, "missing-captions", place, message, remedy, tuple(missing), len(missing))])


_TEXTS = frozenset((".txt", ".caption", ".tags", ".text", ".cap", ".prompt"))


def _near_captions(bare: Sequence[str], ending: str) -> dict[str, str]:
    """{image: name of a text} where one lies beside it that begins with the image's name, in any case or Unicode form,
    and is no other image's: `a.caption`, `a.txt.txt`, `a.png.txt`, `A.TXT`."""
    folders: dict[Path, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in bare:
        folders[Path(path).parent][_plain(Path(path).stem)].append(path)
    near: dict[str, str] = {}
    for folder, meant in folders.items():
        names = list[str]()
        with suppress(OSError, ValueError):  # an image in a list may be nowhere
            names = sorted(path.name for path in folder.iterdir())
        stems = [name.rpartition(".")[0] for name in names if format_of_extension(Path(name).suffix)]
        own, known = {os.path.normcase(stem + ending) for stem in stems}, {*map(_plain, stems), *meant}
        for name in names:
            stem, dot, last = name.rpartition(".")
            if os.path.normcase(name) in own or (dot + last).lower() not in _TEXTS | {ending.lower()}:
                continue
            while _plain(stem) not in known and "." in stem:
                stem = stem.rpartition(".")[0]
            for path in meant.get(_plain(stem), ()):
                near.setdefault(path, name)
    return near


def _plain(stem: str) -> str:
    return unicodedata.normalize("NFC", stem).casefold().strip()
