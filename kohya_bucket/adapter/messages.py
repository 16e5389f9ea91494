"""How a user's mistake ends a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import one_line

__all__ = ["exit_with_message"]


@contextmanager
def exit_with_message() -> Iterator[None]:
    """What a user can mend ends the run with one line, not with a traceback through the trainer."""
    try:
        yield
    except KohyaBucketError as error:
        raise SystemExit(f"kohya_bucket: {one_line(error)}") from error
