"""Resuming at the exact image: `--resume`, `--initial_step`, `--initial_epoch`, `--skip_until_initial_step`.

A file beside each saved state says what is trained of the epoch, so that `--resume` goes on with the next image, also
without `--seed` and on another number of processes. Where an update is asked for by its number, the plan knows the
images that an uninterrupted run would train there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.sampler import Place, PlanSampler
from kohya_bucket.adapter.state_file import NoPlaceError, read_history, write_history
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.resuming.initial_step import OPTIONS, InitialStep
from kohya_bucket.sdscripts.resuming.train_state import counted_by_trainer

__all__ = ["ResumeHooks"]

logger = logging.getLogger("kohya_bucket")


class ResumeHooks:
    """One training run: the accelerator that saves and loads states, and the sampler whose place they hold."""

    def __init__(self) -> None:
        self.sampler: PlanSampler | None = None
        self.accelerator: Any = None
        self.arguments: Any = None
        self._counts = True
        self._loaded: Path | None = None
        self._uneven = 0  # batches of the present epoch that the accelerator does not count

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
                "so it would train other images than asked: leave it out (--resume alone goes on at the next image), "
                "or update kohya-bucket"
            )

    def watch(self, accelerator: Any) -> None:
        """Take part in every state that `accelerator` saves or loads."""
        self.accelerator = accelerator
        accelerator.register_save_state_pre_hook(self._on_save)
        accelerator.register_load_state_pre_hook(self._on_load)

    def attach(self, sampler: PlanSampler) -> None:
        """The sampler of the run's training loader."""
        self.sampler = sampler
        sampler.on_start = self._on_start
        asked = self._asked()
        if self._loaded is not None:
            self._resume(sampler, self._loaded)
        elif asked and not self._argument("resume"):
            self._begin_at(sampler, asked)

    def _on_start(self, first: int) -> None:
        # The accelerator counts the batches of an epoch; states are saved, and gradients accumulated, by it. With
        # another accumulation than before, the first batches may not make whole updates; the next update still does.
        self._uneven = first % self._accumulation
        if self.accelerator is not None:
            self.accelerator.step = first - self._uneven

    def _on_save(self, models: Any, weights: Any, output_dir: str) -> None:
        if self.sampler is not None and is_first_process():
            step = int(self.accelerator.step)  # 0: the epoch is complete
            history = self.sampler.progress(step + self._uneven if step else 0)
            write_history(Path(output_dir), self.sampler.planner, history)

    def _on_load(self, models: Any, input_dir: str) -> None:
        if self.sampler is None:
            self._loaded = Path(input_dir)
        else:
            self._resume(self.sampler, Path(input_dir))

    def _resume(self, sampler: PlanSampler, folder: Path) -> None:
        self._loaded = None
        asked, counted = self._asked(), counted_by_trainer(folder)
        try:
            history = read_history(folder, sampler.planner)
        except NoPlaceError as error:
            if asked is None and self._argument("skip_until_initial_step"):
                asked = counted
            if asked is not None:
                self._begin_at(sampler, asked, f" in this run's own order: {error}")
            elif is_first_process():
                logger.warning("%s: the epoch begins anew", error)
            return
        place = sampler.resume(history)
        update = self._update_at(place)
        if asked is None or asked == update:
            other = "" if counted in (None, update) else f" (update {counted} of the saved run, whose updates differ)"
            self._hand_over(place, update, other)
        else:
            self._begin_at(sampler, asked, f" as asked for, though the state was saved after update {update}")

    def _begin_at(self, sampler: PlanSampler, update: int, why: str = "") -> None:
        """Go to where an uninterrupted run with this plan has made so many updates."""
        epoch, updates = divmod(update, self._updates_per_epoch())
        self._hand_over(sampler.begin_at(epoch + 1, updates * self._accumulation), update, why)

    def _hand_over(self, place: Place, update: int, why: str) -> None:
        """Let the trainer count from `update` on, and not skip again what the sampler leaves out."""
        if is_first_process():
            logger.info(
                "going on after update %d, with batch %d of epoch %d%s", update, place.done + 1, place.epoch, why
            )
        if not hasattr(self.arguments, "initial_step") or not self._counts:
            return  # a trainer that begins to count anew, or in a way of its own
        self.arguments.initial_step = InitialStep.of(update, place.epoch - 1)
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

    def _update_at(self, place: Place) -> int:
        """Updates before a place: whole epochs of them, less those that the place's epoch still holds."""
        per_epoch, left = self._updates_per_epoch(), -(-place.left // self._accumulation)
        return place.epoch * per_epoch - min(left, per_epoch)

    def _argument(self, name: str) -> Any:
        return getattr(self.arguments, name, None)

    @property
    def _accumulation(self) -> int:
        return int(self._argument("gradient_accumulation_steps") or 1)

    def _updates_per_epoch(self) -> int:
        assert self.sampler is not None
        return -(-(len(self.sampler) // self.sampler.world_size) // self._accumulation)
