"""How a user's mistake ends a training run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import one_line

__all__ = ["exit_with_message"]


@contextmanager
def exit_with_message() -> Iterator[None]:
    """What a user can mend ends the run with one line, not with a traceback through the trainer.

    From a loader's worker, torch brings it to the trainer's process; of one that exits, it would know nothing.
    """
    try:
        yield
    except KohyaBucketError as error:
        torch_data = sys.modules.get("torch.utils.data")
        if torch_data is not None and torch_data.get_worker_info() is not None:
            raise
        raise SystemExit(f"kohya_bucket: {one_line(error)}") from error
