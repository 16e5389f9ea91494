"""What `train_network.py` itself remembers of a run."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["counted_by_trainer"]

_TRAIN_STATE = "train_state.json"  # where train_network.py remembers its update count


def counted_by_trainer(folder: Path) -> int | None:
    """The updates that `train_network.py` itself had counted; None for a state of another trainer."""
    file = folder / _TRAIN_STATE
    counted = json.loads(file.read_text(encoding="utf-8")).get("current_step") if file.is_file() else None
    return None if counted is None else int(counted)
