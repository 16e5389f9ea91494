"""Which of several processes this is."""

from __future__ import annotations

import os

__all__ = ["is_first_process"]


def is_first_process() -> bool:
    """Whether this is rank 0, the process that speaks (the launchers say so in the environment)."""
    return os.environ.get("RANK", "0") == "0"
