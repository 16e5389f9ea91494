"""A file of somebody else's making that is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kohya_bucket.errors import KohyaBucketError, why_not_written
from kohya_bucket.files import replacing

__all__ = ["replace_file"]


def replace_file(path: str, write: Callable[[str], object]) -> None:
    """Let `write(temporary)` make a sibling file, then rename it to `path`: readers see the old or the new one.

    Raises:
        KohyaBucketError: the folder cannot be written, or another program holds `path` open (Windows).
    """
    target = Path(os.path.abspath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as temporary:
            write(os.fspath(temporary))
    except OSError as error:
        raise KohyaBucketError(f"{path}: cannot be written: {why_not_written(error)}") from None
