"""A marked block in a file of a trainer's checkout: written, renewed and taken out again byte for byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file

__all__ = ["BEGIN", "END", "CheckoutError", "PatchStatus", "patch_install", "patch_remove", "patch_status"]

BEGIN = "# >>> kohya_bucket >>>"
END = "# <<< kohya_bucket <<<"


class CheckoutError(KohyaBucketError):
    """The folder is no checkout, or its file cannot be changed."""


@dataclass(frozen=True)
class PatchStatus:
    """State of one file: `installed` is False where there is no block, `current` where it is another version's."""

    file: Path
    installed: bool
    current: bool


def patch_status(file: Path, wanted: str) -> PatchStatus:
    """Whether a block is there, and whether it is `wanted`, the one this version writes."""
    text = _read(file)
    block = _find_block(file, text)
    if block is None:
        return PatchStatus(file, False, False)
    # git may have changed the ends of lines, which makes no other version of it
    lines = text[slice(*block)].replace("\r\n", "\n").strip("\n")
    doubled = _find_block(file, _without_block(text, block)) is not None
    return PatchStatus(file, True, lines == wanted.strip("\n") and not doubled)


def patch_install(file: Path, wanted: str) -> PatchStatus:
    """Write the block, or renew an older one. What else the file holds stays as it is."""
    status = patch_status(file, wanted)
    if not status.current:
        text = _without_blocks(status.file)
        # A file without an end of its last line gets the block without one, too, and so comes out as it was.
        whole = not text or text.endswith("\n")
        _write(status.file, text + (wanted if whole else "\n" + wanted.rstrip("\n")))
    return patch_status(file, wanted)


def patch_remove(file: Path, wanted: str) -> PatchStatus:
    """Take the block out; the file is then byte for byte what it was."""
    status = patch_status(file, wanted)
    if status.installed:
        _write(status.file, _without_blocks(status.file))
    return patch_status(file, wanted)


def _find_block(file: Path, text: str) -> tuple[int, int] | None:
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 and end < 0:
        return None
    if begin < 0 or end < begin:
        raise CheckoutError(f"{file} holds half a kohya_bucket block: remove the lines around {BEGIN!r} by hand")
    stop = end + len(END)
    for line_end in ("\r\n", "\n"):
        if text.startswith(line_end, stop):
            return begin, stop + len(line_end)
    if text[:begin].endswith("\n"):
        begin -= 2 if text[:begin].endswith("\r\n") else 1
    return begin, stop


def _without_block(text: str, block: tuple[int, int]) -> str:
    return text[: block[0]] + text[block[1] :]


def _without_blocks(file: Path) -> str:
    """The file's text without any block; a merge may have doubled it."""
    text = _read(file)
    while (block := _find_block(file, text)) is not None:
        text = _without_block(text, block)
    return text


def _read(file: Path) -> str:
    if not file.exists():
        raise CheckoutError(f"{file} does not exist, but every release has it: restore it with git checkout")
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as handle:
        return handle.read()


def _write(file: Path, text: str) -> None:
    replace_file(file, text.encode("utf-8", "surrogateescape"))
