"""A file that is replaced whole: readers see the old or the new one."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from typing import Any

from kohya_bucket.errors import KohyaBucketError, why_not_written

__all__ = ["replace_file"]

_RETRIES = 20


def replace_file(path: str, write: Any) -> None:
    """Let `write(temporary)` make a sibling file, then rename it to `path`: readers see the old or the new one.

    Raises:
        KohyaBucketError: the folder cannot be written, or another program holds `path` open (Windows).
    """
    folder = os.path.dirname(os.path.abspath(path))
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        os.makedirs(folder, exist_ok=True)
        # As public as any other file of its user: what `tempfile` makes is private, and to ask for the user's mask
        # is to change it for all threads.
        open(temporary, "xb").close()
    except OSError as error:
        raise KohyaBucketError(f"{path}: cannot be written: {why_not_written(error)}") from None
    try:
        write(temporary)
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())  # or a power failure could leave the new name without the new content
        for attempt in range(_RETRIES):
            try:
                os.replace(temporary, path)
                break
            except PermissionError:
                if attempt == _RETRIES - 1:
                    raise
                time.sleep(0.05)
    except OSError as error:
        raise KohyaBucketError(f"{path}: cannot be written: {why_not_written(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
