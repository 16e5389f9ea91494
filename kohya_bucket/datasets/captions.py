"""Captions as text: what a file, a member of a tar or a cell of a table holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.remote import is_url, read_remote, split_archive
from kohya_bucket.inputs import MAX_CAPTION_BYTES, read_input
from kohya_bucket.texts import one_line, parse_json, uncaptioned

_log = logging.getLogger("kohya_bucket.datasets")


def warn_uncaptioned(bare: Sequence[str], total: int, kind: str = "caption") -> None:
    """Log, on the first rank, which of `total` images have no caption, or none of a kind, where there are such."""
    if bare and is_first_process():
        _log.warning("%s", one_line(uncaptioned(bare, total, kind=kind)))


def is_blank(cell: Any) -> bool:
    """Whether the cell of a caption holds none."""
    return cell is None or (isinstance(cell, (str, bytes)) and not cell.strip())


def caption_beside(image: str, ending: str) -> str | None:
    """The caption in the file beside an image, on this machine or at an address; None where there is no such file.

    Raises:
        KohyaBucketError: it cannot be read, see `caption_of_file`.
    """
    beside = str(Path(image).with_suffix(ending))
    if is_url(image):  # of which a Path would drop a slash
        member, archive = split_archive(image)
        beside = os.path.splitext(member)[0] + ending + archive  # noqa: PTH122
    try:
        content = read_remote(beside) if is_url(image) else read_input(beside, MAX_CAPTION_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KohyaBucketError(f"{beside}: the caption cannot be read ({error.strerror or error})") from error
    return caption_of_file(content, beside)


def caption_of_file(content: bytes, name: str) -> str:
    """The caption in a file of UTF-8 text, or in one of JSON if its `name` says so: a text, or "caption" of an object.

    Raises:
        KohyaBucketError: no UTF-8, no JSON, or no caption in it.
    """
    try:
        text = content.decode("utf-8-sig").strip()
        if not name.lower().endswith(".json"):
            return text
        value = parse_json(text)
        caption = value.get("caption") if isinstance(value, dict) else value
        if isinstance(caption, str):
            caption.encode("utf-8")  # JSON may hold half of a character, as of a text that was cut
            return caption.strip()
    except ValueError as error:
        kind = "UTF-8 text" if isinstance(error, UnicodeError) else "JSON"
        raise KohyaBucketError(f"{name}: the caption cannot be read ({error}); it must be {kind}") from error
    held = f"the keys {', '.join(value) or '(none)'}" if isinstance(value, dict) else type(value).__name__
    raise KohyaBucketError(
        f'{name}: the caption must be a JSON text, or a text under the key "caption" of an object, but it holds {held}'
    )


def caption_of_cell(cell: Any, name: str) -> str:
    """The caption in a cell of a table or a sample; "" for None.

    Raises:
        KohyaBucketError: the cell holds something else than one text.
    """
    if cell is None:
        return ""
    if isinstance(cell, bytes):
        return caption_of_file(cell, name)
    if isinstance(cell, str):
        return cell.strip()
    raise KohyaBucketError(
        f"{name}: its caption is {cell!r} ({type(cell).__name__}), but must be one text: make a column of texts first"
    )
