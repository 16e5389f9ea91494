"""What any trainer does with captions that their authors did not intend."""

from __future__ import annotations

from collections.abc import Iterable

from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.findings import Findings

MARK = "\ufeff"
"""What an editor's "UTF-8 with BOM" puts in front of a text; no trainer takes it away."""


def check_marks(captions: Iterable[tuple[str, str | None]], place: str, findings: Findings) -> None:
    """Name the captions, given as (name, text), that hold a byte order mark."""
    if marked := [name for name, text in captions if text is not None and MARK in text]:
        message = f"{counted(len(marked), 'caption')} with a byte order mark (U+FEFF), which is trained with the word "
        message += f"behind it ({some(marked, 2)})"
        findings.warning("caption-mark", place, message, "save the captions as 'UTF-8', not 'UTF-8 with BOM'", marked)
