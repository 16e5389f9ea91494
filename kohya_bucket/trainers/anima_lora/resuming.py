"""Resuming at the exact image. anima_lora counts as sd-scripts does, in two functions."""

from __future__ import annotations

from typing import Any

from kohya_bucket.trainers.sdscripts.carried import InitialStep
from kohya_bucket.trainers.sdscripts.resuming import TrainerResume


class FirstBatch(InitialStep):
    """Updates that are trained already. The trainer makes batches of them, and divides these twice: by those of an
    epoch, for the epoch to begin in, and then into updates again.
    """

    _divisions = 0
    _updates = 0

    def __mul__(self, accumulation: Any) -> FirstBatch:
        batches = FirstBatch(int(self) * accumulation)
        batches.epoch, batches._updates = self.epoch, int(self)
        return batches

    def __floordiv__(self, divisor: Any) -> int:
        self._divisions += 1
        return self.epoch if self._divisions == 1 else self._updates


class Resume(TrainerResume):
    """A run of `train.py`."""

    initial_step = FirstBatch
