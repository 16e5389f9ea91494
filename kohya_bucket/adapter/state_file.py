"""The file in a saved state that remembers how far the epoch was trained.

sd-scripts' states hold weights, optimiser and a step count, but not which images an epoch has still to train.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kohya_bucket.adapter.group import GroupPlanner, TrainedPart
from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import write_file

__all__ = ["STATE_FILE", "NoPlaceError", "read_history", "write_history"]

STATE_FILE = "kohya_bucket_state.json"

_FORMAT = 1


class NoPlaceError(KohyaBucketError):
    """A saved state does not say at which image of this data set it was saved."""


def write_history(folder: Path, planner: GroupPlanner, history: Sequence[TrainedPart]) -> None:
    """Save what is trained of the present epoch, in order; a disk that is full ends the run with one line."""
    state = {
        "format": _FORMAT,
        "images": planner.digest,
        "count": len(planner.bucket_ids),
        "trained": [asdict(part) for part in history],
    }
    with exit_with_message():
        write_file(folder / STATE_FILE, [json.dumps(state).encode("utf-8")])


def read_history(folder: Path, planner: GroupPlanner) -> list[TrainedPart]:
    """What was trained of the epoch when the state was saved, in order.

    Raises:
        NoPlaceError: that is not known, or was another data set's epoch.
    """
    file = folder / STATE_FILE
    if not file.is_file():
        raise NoPlaceError(f"{folder} was saved without kohya_bucket")
    state = json.loads(file.read_text(encoding="utf-8"))
    if state["format"] != _FORMAT or state["images"] != planner.digest:
        raise NoPlaceError(
            f"the data set or its options changed since {folder} was saved ({state['count']} images then, "
            f"{len(planner.bucket_ids)} now)"
        )
    return [TrainedPart(**{**part, "global_batch": tuple(part["global_batch"])}) for part in state["trained"]]
