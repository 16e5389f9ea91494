"""Captions in files beside images: those at which a trainer stops, and those that it does not find."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kohya_bucket.errors import ConfigError, TooLongError
from kohya_bucket.images.scan import Job, ScanTask
from kohya_bucket.inputs import MAX_CAPTION_BYTES, read_small
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.findings import Findings, fix_command


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


def without_other_forms(
    bare: Sequence[str], names: Iterable[str], ending: str, place: str, findings: Findings
) -> list[str]:
    """Name the images whose caption file is there under the same name in another Unicode form; returns the others.

    Args:
        bare: paths of images without a caption file, all of one folder.
        names: of the files in the folder.
        ending: of caption files.
    """
    captions = {unicodedata.normalize("NFC", name): name for name in names if name.endswith(ending)}
    beside = {}
    for path in bare:
        caption = Path(path).stem + ending
        other = captions.get(unicodedata.normalize("NFC", caption), caption)
        if other != caption:  # what has the very name is a folder, a pipe or a device
            beside[path] = other
    if beside:
        both = [f"{Path(path).name!a} beside {caption!a}" for path, caption in beside.items()]
        message = f"{counted(len(beside), 'image', 'has', 'have')} a caption file whose name looks the same and is "
        message += f"written in another Unicode form (NFC or NFD), so that no trainer finds it ({some(both, 2)})"
        findings.warning("unicode-form", place, message, "rename the captions to the images' very names", list(beside))
    return [path for path in bare if path not in beside]
