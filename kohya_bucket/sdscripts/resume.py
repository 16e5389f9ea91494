"""Resuming at the exact image: what a saved training state remembers of the epoch.

sd-scripts' states hold weights, optimiser and a step count, but not which images an epoch has still to train.
A small file beside them does, so that `--resume` goes on with the next image, also without `--seed` and on
another number of processes.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.atomic import write_file
from kohya_bucket.sdscripts.planner import Progress
from kohya_bucket.sdscripts.processes import is_first_process
from kohya_bucket.sdscripts.sampler import PlanSampler

__all__ = ["STATE_FILE", "Run"]

STATE_FILE = "kohya_bucket_state.json"
_FORMAT = 1
_OWN_PLACE = ("skip_until_initial_step", "initial_step", "initial_epoch")  # trainer options that set the place
_TRAIN_STATE = "train_state.json"  # where train_network.py remembers its update count, which it takes epochs from

logger = logging.getLogger("kohya_bucket")


class Run:
    """One training run: the accelerator that saves and loads states, and the sampler whose place they hold."""

    def __init__(self) -> None:
        self.sampler: PlanSampler | None = None
        self.accelerator: Any = None
        self.arguments: Any = None
        self._loaded: Path | None = None
        self._current_step: Any = None
        self._took_over = False

    def watch(self, accelerator: Any, arguments: Any) -> None:
        """Take part in every state that `accelerator` saves or loads."""
        self.accelerator, self.arguments = accelerator, arguments
        accelerator.register_save_state_pre_hook(self._on_save)
        accelerator.register_load_state_pre_hook(self._on_load)

    def attach(self, sampler: PlanSampler, current_step: Any = None) -> None:
        """The sampler of the run's training loader, and the counter in which its trainer keeps the update it is at."""
        self.sampler, self._current_step = sampler, current_step
        sampler.on_start = self._on_start
        if self._loaded is not None:
            self._resume(self._loaded)

    def _on_start(self, first: int) -> None:
        # The accelerator counts the batches of an epoch; states are saved, and gradients accumulated, by it.
        if self.accelerator is not None and first:
            self.accelerator.step = first

    def _on_save(self, models: Any, weights: Any, output_dir: str) -> None:
        if self.sampler is None or not is_first_process():
            return
        history = self.sampler.progress(int(self.accelerator.step))
        if self._took_over and self._current_step is not None:
            # The trainer counts from 0 since then; what it writes next into its own file is counted from the start.
            done = sum(part.steps for part in history)
            updates = (history[-1].epoch - 1) * self._updates_per_epoch() + -(-done // self._accumulation)
            self._current_step.value = updates - 1
        state = {
            "format": _FORMAT,
            "images": self.sampler.planner.digest,
            "count": len(self.sampler.planner.bucket_ids),
            "trained": [asdict(part) for part in history],
        }
        try:
            write_file(Path(output_dir) / STATE_FILE, [json.dumps(state).encode("utf-8")])
        except KohyaBucketError as error:
            raise SystemExit(f"kohya_bucket: {error}") from error

    def _on_load(self, models: Any, input_dir: str) -> None:
        if self.sampler is None:
            self._loaded = Path(input_dir)
        else:
            self._resume(Path(input_dir))

    def _resume(self, folder: Path) -> None:
        self._loaded = None
        sampler, file = self.sampler, folder / STATE_FILE
        if sampler is None:
            return
        if not file.is_file():
            _tell(f"{folder} was saved without kohya_bucket: the epoch begins anew")
            return
        state = json.loads(file.read_text(encoding="utf-8"))
        if state["format"] != _FORMAT or state["images"] != sampler.planner.digest:
            _tell(
                f"the data set or its options changed since {folder} was saved "
                f"({state['count']} images then, {len(sampler.planner.bucket_ids)} now): the epoch begins anew"
            )
            return
        history = [Progress(**{**part, "global_batch": tuple(part["global_batch"])}) for part in state["trained"]]
        asked = [name for name in _OWN_PLACE if getattr(self.arguments, name, None)]
        if not asked:
            sampler.resume(history)
            return
        sampler.seed = history[0].seed
        if self._accumulation == 1 or "skip_until_initial_step" not in asked:
            return
        if asked == ["skip_until_initial_step"] and (folder / _TRAIN_STATE).is_file():
            self._take_over(history)
        else:
            _tell(
                "--skip_until_initial_step miscounts with gradient accumulation; leave --initial_step and "
                "--initial_epoch out, and --resume goes on at the exact image"
            )

    def _take_over(self, history: list[Progress]) -> None:
        """Skip in the trainer's stead: it mixes batches and updates when gradients are accumulated.

        Without its option the trainer begins in the right epoch, and counts updates from 0. It would then train its
        last epoch whole; the sampler ends where `--max_train_steps` says.
        """
        assert self.sampler is not None
        self.arguments.skip_until_initial_step = False
        self._took_over = True
        self.sampler.resume(history)
        per_epoch, total = self._updates_per_epoch(), int(self.arguments.max_train_steps)
        epochs = -(-total // per_epoch)
        self.sampler.end = (epochs, (total - (epochs - 1) * per_epoch) * self._accumulation)
        if is_first_process():
            logger.info(
                "--skip_until_initial_step: going on at the exact image; the step numbers shown and in file names "
                "count from here"
            )

    @property
    def _accumulation(self) -> int:
        return int(getattr(self.arguments, "gradient_accumulation_steps", 1) or 1)

    def _updates_per_epoch(self) -> int:
        assert self.sampler is not None
        return -(-(len(self.sampler) // self.sampler.world_size) // self._accumulation)


def _tell(text: str) -> None:
    if is_first_process():
        logger.warning(text)
