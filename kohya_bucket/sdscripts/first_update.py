"""`--initial_step`, as a number that comes through `train_network.py`'s arithmetic as it is.

The trainer multiplies the number of the first update by the accumulation, divides that by updates to get the first
epoch, and takes whole epochs of batches off it, whose rest it believes to be the update again. So with accumulation
it lands in another epoch at another image, and from the second epoch on its step numbers are too small, and too many
updates follow. The place is known here; the trainer only has to be told.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FirstUpdate"]


class FirstUpdate(int):
    """Updates that are trained already, which stand in `epoch` (from 0), whatever is computed from them.

    Only what the trainer does to its `initial_step` has another result than with a plain number: times the
    accumulation, less the batches of an epoch, and divided by the updates of one. `max_train_steps - initial_step`
    and what is counted on from here are plain numbers.
    """

    epoch: int

    @classmethod
    def of(cls, update: int, epoch: int) -> FirstUpdate:
        first = cls(update)
        first.epoch = epoch
        return first

    def __mul__(self, accumulation: Any) -> FirstUpdate:
        return self

    def __sub__(self, batches: Any) -> FirstUpdate:
        return self

    def __floordiv__(self, updates_per_epoch: Any) -> int:
        return self.epoch
