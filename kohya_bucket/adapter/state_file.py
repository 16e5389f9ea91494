"""The file in a saved state that remembers how far the epoch was trained.

sd-scripts' states hold weights, optimiser and a step count, but not which images an epoch has still to train.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import write_file
from kohya_bucket.planning import EpochPosition
from kohya_bucket.planning.batch_sizes import one_or_all
from kohya_bucket.planning.resume import OtherDataError, position_of
from kohya_bucket.texts import counted, parse_json, read_text

__all__ = ["STATE_FILE", "NoPlaceError", "read_position", "write_position"]

STATE_FILE = "kohya_bucket_state.json"


class NoPlaceError(KohyaBucketError):
    """A saved state does not say at which image of this data set it was saved."""


def write_position(folder: Path, position: EpochPosition, fingerprint: Mapping[str, Any]) -> None:
    """Save where the present epoch stands; a disk that is full ends the run with one line."""
    text = json.dumps(position.state_dict(fingerprint))
    with exit_with_message():
        write_file(folder / STATE_FILE, [text.encode("utf-8")])


def read_position(folder: Path, planner: GroupPlanner, ranks: int) -> EpochPosition:
    """Where the epoch stood when the state was saved.

    Raises:
        NoPlaceError: that is not known, or was another data set's epoch.
    """
    file = folder / STATE_FILE
    if not file.is_file():
        raise NoPlaceError(f"{folder} was saved without kohya_bucket")
    try:
        state = parse_json(read_text(file))
        if isinstance(state, dict) and "format" in state:
            return _before_fingerprints(state, planner)
        return EpochPosition.from_state_dict(state, planner.fingerprint(ranks))
    except OtherDataError as error:
        raise NoPlaceError(
            f"the data set or its options changed since {folder} was saved ({'; '.join(error.changed)})"
        ) from error
    except KohyaBucketError as error:
        raise NoPlaceError(f"{folder}: {error}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoPlaceError(f"{file} is damaged ({type(error).__name__}: {error})") from error


def _before_fingerprints(state: Mapping[str, Any], planner: GroupPlanner) -> EpochPosition:
    """A state as it was written while it held a digest: `format` 1, with seed and epoch in each part."""
    if state["format"] != 1 or state["images"] != planner.digest:
        raise OtherDataError("its place", [f"{counted(state['count'], 'image')} then, {len(planner.bucket_ids)} now"])
    first = state["trained"][0]
    parts = [(one_or_all(np.array(part["global_batch"])), part["steps"]) for part in state["trained"]]
    return position_of(first["seed"], first["epoch"], parts)
