"""Resuming at the exact image. anima_lora counts as sd-scripts does, in two functions."""

from __future__ import annotations

from typing import Any

from kohya_bucket.trainers.sdscripts.resuming import InitialStep, TrainerResume


class FirstBatch(InitialStep):
    """Updates that are trained already, which the trainer makes batches of, and divides twice: by what an epoch has,
    and then into updates again.
    """

    _divisions = 0
    _updates = 0

    def __mul__(self, accumulation: Any) -> FirstBatch:
        batches = FirstBatch(int(self) * accumulation)
        batches.epoch, batches._updates = self.epoch, int(self)
        return batches

    def __floordiv__(self, number: Any) -> int:
        self._divisions += 1
        return self.epoch if self._divisions == 1 else self._updates


class Resume(TrainerResume):
    """A run of `train.py`."""

    initial_step = FirstBatch
