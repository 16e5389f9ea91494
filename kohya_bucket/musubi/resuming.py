"""musubi-tuner's states, and what a resumed run says of the step, which the trainer itself counts.

Not part of `door.py`: commands import that one, and need no torch.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.resume import ResumeHooks
from kohya_bucket.adapter.sampler import PlanSampler
from kohya_bucket.planning.resume import ResumePoint

__all__ = ["MusubiResume"]

logger = logging.getLogger("kohya_bucket")


class MusubiResume(ResumeHooks):
    """One training run of musubi-tuner."""

    def on_resumed(self, sampler: PlanSampler, point: ResumePoint, folder: Path) -> None:
        super().on_resumed(sampler, point, folder)
        if is_first_process():
            logger.info(
                "the trainer itself counts steps and epochs from 0 again: the rest of epoch %d is its first epoch, and "
                "--max_train_epochs and --max_train_steps are those of this run alone",
                point.epoch,
            )
