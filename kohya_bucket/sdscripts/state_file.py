"""The file in a saved state that remembers how far the epoch was trained.

sd-scripts' states hold weights, optimiser and a step count, but not which images an epoch has still to train.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.atomic import write_file
from kohya_bucket.sdscripts.one_line import one_line
from kohya_bucket.sdscripts.planner import GroupPlanner, Progress

__all__ = ["STATE_FILE", "NoPlaceError", "counted_by_trainer", "read_history", "write_history"]

STATE_FILE = "kohya_bucket_state.json"
_FORMAT = 1
_TRAIN_STATE = "train_state.json"  # where train_network.py remembers its update count


class NoPlaceError(KohyaBucketError):
    """A saved state does not say at which image of this data set it was saved."""


def write_history(folder: Path, planner: GroupPlanner, history: Sequence[Progress]) -> None:
    """Save what is trained of the present epoch, in order; a disk that is full ends the run with one line."""
    state = {
        "format": _FORMAT,
        "images": planner.digest,
        "count": len(planner.bucket_ids),
        "trained": [asdict(part) for part in history],
    }
    with one_line():
        write_file(folder / STATE_FILE, [json.dumps(state).encode("utf-8")])


def read_history(folder: Path, planner: GroupPlanner) -> list[Progress]:
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
    return [Progress(**{**part, "global_batch": tuple(part["global_batch"])}) for part in state["trained"]]


def counted_by_trainer(folder: Path) -> int | None:
    """The updates that `train_network.py` itself had counted; None for a state of another trainer."""
    file = folder / _TRAIN_STATE
    counted = json.loads(file.read_text(encoding="utf-8")).get("current_step") if file.is_file() else None
    return None if counted is None else int(counted)
