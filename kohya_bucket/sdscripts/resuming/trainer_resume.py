"""Resuming at the exact image: `--resume`, `--initial_step`, `--initial_epoch`, `--skip_until_initial_step`.

Where an update is asked for by its number, the plan knows the images that an uninterrupted run would train there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.resume import NoPlaceError, ResumeHooks
from kohya_bucket.adapter.sampler import PlanSampler
from kohya_bucket.errors import ConfigError
from kohya_bucket.planning.resume import ResumePoint
from kohya_bucket.sdscripts.resuming.initial_step import OPTIONS, InitialStep
from kohya_bucket.sdscripts.resuming.train_state import counted_by_trainer

__all__ = ["TrainerResume"]

logger = logging.getLogger("kohya_bucket")


class TrainerResume(ResumeHooks):
    """A run of one of sd-scripts' trainers, which count updates, and may be told from which to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: Any = None
        self._counts = True

    def take_arguments(self, arguments: Any, *, counts: bool) -> None:
        """The trainer's command line.

        Args:
            arguments: as parsed.
            counts: whether it is known how the trainer counts from its initial step.

        Raises:
            ConfigError: an option that needs that count, where it is not known.
        """
        self.arguments, self._counts = arguments, counts
        asked = [name for name in OPTIONS if self._argument(name)]
        if asked and not counts:
            raise ConfigError(
                f"--{asked[0]} is given, but this trainer computes with its initial step in a way that is not known, "
                "so it would train other images than asked: leave it out (--resume alone continues with the next "
                "image), "
                "or update kohya-bucket"
            )

    def attach(self, sampler: PlanSampler) -> None:
        waiting = self._loaded is not None
        super().attach(sampler)
        asked = self._asked()
        if asked and not waiting and not self._argument("resume"):
            self._begin_at(sampler, asked)

    @property
    def accumulation(self) -> int:
        return int(self._argument("gradient_accumulation_steps") or 1)

    def went_on(self, sampler: PlanSampler, point: ResumePoint, folder: Path) -> None:
        asked, counted, update = self._asked(), counted_by_trainer(folder), self._update_at(point)
        if asked is None or asked == update:
            other = "" if counted in (None, update) else f" (update {counted} of the saved run, whose updates differ)"
            self._hand_over(point, update, other)
        else:
            self._begin_at(sampler, asked, f" as asked for, though the state was saved after update {update}")

    def found_no_place(self, sampler: PlanSampler, folder: Path, error: NoPlaceError) -> None:
        asked = self._asked()
        if asked is None and self._argument("skip_until_initial_step"):
            asked = counted_by_trainer(folder)
        if asked is None:
            super().found_no_place(sampler, folder, error)
        else:
            self._begin_at(sampler, asked, f" in this run's own order: {error}")

    def _begin_at(self, sampler: PlanSampler, update: int, why: str = "") -> None:
        """Go to where an uninterrupted run with this plan has made so many updates."""
        epoch, updates = divmod(update, self._updates_per_epoch())
        self._hand_over(sampler.begin_at(epoch + 1, updates * self.accumulation), update, why)

    def _hand_over(self, point: ResumePoint, update: int, why: str) -> None:
        """Let the trainer count from `update` on, and not skip again what the sampler leaves out."""
        if is_first_process():
            logger.info(
                "going on after update %d, with batch %d of epoch %d%s", update, point.done + 1, point.epoch, why
            )
        if not hasattr(self.arguments, "initial_step") or not self._counts:
            return  # a trainer that begins to count anew, or in a way of its own
        self.arguments.initial_step = InitialStep.of(update, point.epoch - 1)
        self.arguments.skip_until_initial_step = True
        self.accelerator.skip_first_batches = self._skip_first_batches

    def _skip_first_batches(self, loader: Any, count: Any = 0) -> Any:
        if self.sampler is None or not isinstance(count, InitialStep):
            return type(self.accelerator).skip_first_batches(self.accelerator, loader, count)
        # The trainer asks for one batch less than it skips, and throws the first one away.
        self.sampler.repeat_first = True
        return loader

    def _asked(self) -> int | None:
        """The updates that the user says are done, if so."""
        step, epoch = self._argument("initial_step"), self._argument("initial_epoch")
        if step is not None:
            return max(int(step), 0)
        return None if epoch is None else max(int(epoch) - 1, 0) * self._updates_per_epoch()

    def _update_at(self, point: ResumePoint) -> int:
        """Updates before a point: whole epochs of them, less those that the point's epoch still holds."""
        per_epoch, left = self._updates_per_epoch(), -(-point.left // self.accumulation)
        return point.epoch * per_epoch - min(left, per_epoch)

    def _argument(self, name: str) -> Any:
        return getattr(self.arguments, name, None)

    def _updates_per_epoch(self) -> int:
        assert self.sampler is not None
        return -(-(len(self.sampler) // self.sampler.world_size) // self.accumulation)
