"""Whether an epoch's plan fits into memory, asked before any of it is taken."""

from __future__ import annotations

import os

from kohya_bucket.errors import PlanError

__all__ = ["check_memory"]

_BYTES = 50  # of a training, at the peak: order keys, places and row numbers of 8 bytes each, the plan itself of 4


def check_memory(total: int, epoch: int) -> None:
    """Refuse to plan so many trainings where that takes more memory than the machine has.

    Raises:
        PlanError: with what it would take and what there is.
    """
    there = _machine_memory()
    if there is not None and total * _BYTES > there:
        raise PlanError(
            f"epoch {epoch} is asked to train {total:,} images, repeats counted: to plan it takes about "
            f"{total * _BYTES / 2**30:,.0f} GiB of memory, and this machine has {there / 2**30:,.0f} GiB: lower "
            "repeats and train more epochs"
        )


def _machine_memory() -> int | None:
    """Bytes; None where the system does not tell (Windows, which refuses memory that it does not have)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
