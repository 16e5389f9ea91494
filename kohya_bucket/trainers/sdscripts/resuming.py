"""Resuming at the exact image: `--resume`, `--initial_step`, `--initial_epoch`, `--skip_until_initial_step`.

Where an update is asked for by its number, the plan knows the images that an uninterrupted run would train there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kohya_bucket.checks import is_first_process
from kohya_bucket.planning.resume import ResumePoint
from kohya_bucket.texts import parse_json, read_text
from kohya_bucket.trainers.door.ranks import end_run
from kohya_bucket.trainers.door.resume import NoPlaceError, ResumeHooks
from kohya_bucket.trainers.door.sampler import PlanSampler
from kohya_bucket.trainers.sdscripts.carried import InitialStep

logger = logging.getLogger("kohya_bucket")


OPTIONS = ("initial_step", "initial_epoch", "skip_until_initial_step")
_TRAIN_STATE = "train_state.json"  # where train_network.py remembers its update count


class TrainerResume(ResumeHooks):
    """A run of one of sd-scripts' trainers, which count updates, and may be told from which to go on."""

    initial_step = InitialStep  # what the trainer is given as the number of its first update

    def __init__(self) -> None:
        super().__init__()
        self.arguments: Any = None  # the trainer's command line
        self._not_taken_up = False  # an initial step was handed over, and the trainer has not skipped to it yet

    def attach(self, sampler: PlanSampler) -> None:
        has_state = self._loaded is not None or self._argument("resume")  # which says the place, now or later
        super().attach(sampler)
        asked = self._asked()
        if asked and not has_state:
            self._begin_at(sampler, asked)

    @property
    def accumulation(self) -> int:
        return int(self._argument("gradient_accumulation_steps") or 1)

    def on_resumed(self, sampler: PlanSampler, point: ResumePoint, folder: Path) -> None:
        asked, counted, update = self._asked(), counted_by_trainer(folder), self._update_at(point)
        if asked is None or asked == update:
            other = "" if counted in (None, update) else f" (update {counted} of the saved run, whose updates differ)"
            self._hand_over(point, update, other)
        else:
            self._begin_at(sampler, asked, f" as asked for, though the state was saved after update {update}")

    def on_no_place(self, sampler: PlanSampler, folder: Path, error: NoPlaceError) -> None:
        asked = self._asked()
        if asked is None and self._argument("skip_until_initial_step"):
            asked = counted_by_trainer(folder)
        if asked is None:
            super().on_no_place(sampler, folder, error)
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
        if not all(hasattr(self.arguments, name) for name in OPTIONS):
            return  # a trainer that counts from 0 again
        self.arguments.initial_step = self.initial_step.at(update, point.epoch - 1)
        self.arguments.skip_until_initial_step = True
        self._not_taken_up = update > 0
        self.accelerator.skip_first_batches = self._skip_first_batches

    def _skip_first_batches(self, loader: Any, count: Any = 0) -> Any:
        # The trainer asks for one batch less than it skips, and throws the first one away.
        as_known = isinstance(count, InitialStep) and count.taken_off == 1
        if self.sampler is None or not as_known or self.sampler.epoch != count.epoch + 1:
            return type(self.accelerator).skip_first_batches(self.accelerator, loader, count)
        self.sampler.repeat_first, self._not_taken_up = True, False
        return loader

    def _on_start(self, first: int) -> None:
        super()._on_start(first)
        if self._not_taken_up:
            end_run(
                "this trainer computes with its initial step in a way that is not known, so it would train other "
                "images than asked: update kohya-bucket, or resume without it"
            )

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


def counted_by_trainer(folder: Path) -> int | None:
    """The updates that `train_network.py` itself had counted; None for a state of another trainer."""
    file = folder / _TRAIN_STATE
    counted = parse_json(read_text(file)).get("current_step") if file.is_file() else None
    return None if counted is None else int(counted)
