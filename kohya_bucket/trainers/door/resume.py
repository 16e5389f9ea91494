"""Resuming at the exact image, behind accelerate's saved states.

A file beside each saved state says what is trained of the epoch, so that a resumed run goes on with the next image,
also without a seed and on another number of processes.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kohya_bucket.checks import is_first_process
from kohya_bucket.datasets.agreement import gather
from kohya_bucket.errors import KohyaBucketError, UnreadableError, reading
from kohya_bucket.files import write_file
from kohya_bucket.planning import EpochPosition
from kohya_bucket.planning.resume import OtherDataError, ResumePoint
from kohya_bucket.texts import one_line, parse_json, read_text
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.ranks import end_run, exit_with_message, warn_once
from kohya_bucket.trainers.door.sampler import PlanSampler
from kohya_bucket.trainers.door.seams import Replaced, Seam
from kohya_bucket.trainers.door.shapes import Offers

STATE_FILE = "kohya_bucket_state.json"


class NoPlaceError(KohyaBucketError):
    """A saved state does not say at which image of this dataset it was saved."""


_FOCUS = "focus"  # in the file: digest of the focus of all images; it decides no order


def write_position(
    folder: Path, position: EpochPosition, fingerprint: Mapping[str, Any], focus: str | None = None
) -> None:
    """Save where the present epoch stands; a disk that is full ends the run with one line."""
    text = json.dumps(position.state_dict(fingerprint) | {_FOCUS: focus})
    with exit_with_message():
        write_file(folder / STATE_FILE, [text.encode("utf-8")])


def read_position(folder: Path, planner: GroupPlanner, ranks: int) -> EpochPosition:
    """Where the epoch stood when the state was saved.

    Raises:
        NoPlaceError: that is not known, or was another dataset's epoch.
        UnreadableError: it cannot be read now.
    """
    file = folder / STATE_FILE
    try:
        with reading(file):
            state = parse_json(read_text(file))
        position = EpochPosition.from_state_dict(state, planner.fingerprint(ranks))
        planner.planner(ranks).plan_at(position)  # refuses more steps than the epoch has
        _say_focus_changed(folder, state, planner.focus)
        return position
    except FileNotFoundError as error:
        raise NoPlaceError(f"{folder} was saved without kohya_bucket") from error
    except UnreadableError:
        raise
    except OtherDataError as error:
        raise NoPlaceError(
            f"the dataset or its options changed since {folder} was saved ({'; '.join(error.changed)})"
        ) from error
    except KohyaBucketError as error:
        raise NoPlaceError(f"{folder}: {error}") from error
    except ValueError as error:
        raise NoPlaceError(f"{file} is damaged ({type(error).__name__}: {error})") from error


def _place_of_all(sampler: PlanSampler, folder: Path) -> EpochPosition | KohyaBucketError:
    """What the first process reads, or why it cannot: other machines may have a folder of that name without the file,
    and processes that begin at different images would wait for each other forever."""
    place: EpochPosition | KohyaBucketError
    try:
        place = read_position(folder, sampler.planner, sampler.world_size)
    except (UnreadableError, NoPlaceError) as error:
        place = error
    return place if sampler.world_size == 1 else gather({"place": place})[0]["place"]


def _say_focus_changed(folder: Path, state: Mapping[str, Any], now: str | None) -> None:
    """A focus that is set, moved or gone changes pictures and not their order: the epoch goes on."""
    then = state.get(_FOCUS)
    if _FOCUS not in state and now is not None:
        warn_once(f"{folder} does not say with which focus it was saved: from here on crops keep the present one")
    elif then != now:
        how = "changed since" if then and now else "is set, and was not when" if now else "is not set, and was when"
        warn_once(f"focus {how} {folder} was saved: from here on images are cut differently")


logger = logging.getLogger("kohya_bucket")


def say_resumed(point: ResumePoint) -> None:
    """The epoch goes on at a point."""
    if is_first_process():
        logger.info("going on with batch %d of epoch %d", point.done + 1, point.epoch)


def say_no_place(why: object) -> None:
    """It begins again, and why."""
    if is_first_process():
        logger.warning("%s: the epoch starts again from its first image", one_line(why))


class Accelerator(Protocol):
    """accelerate's, as far as states and the place in an epoch are concerned."""

    step: int

    def register_save_state_pre_hook(self, hook: Any) -> Any: ...

    def register_load_state_pre_hook(self, hook: Any) -> Any: ...


class ResumeHooks:
    """One training run: the accelerator that saves and loads states, and the sampler whose place they hold.

    Args:
        caution: what the log says besides when a run is resumed; `{epoch}` is the epoch.
    """

    def __init__(self, caution: str = "") -> None:
        self._caution = caution
        self.sampler: PlanSampler | None = None
        self.accelerator: Any = None
        self._loaded: Path | None = None
        self._uneven = 0  # batches of the present epoch that the accelerator does not count
        self._begun = False  # an epoch, of which nothing is said yet

    def watch(self, accelerator: Any) -> None:
        """Take part in every state that `accelerator` saves or loads."""
        self.accelerator = accelerator
        accelerator.register_save_state_pre_hook(self.on_save)
        accelerator.register_load_state_pre_hook(self.on_load)

    def attach(self, sampler: PlanSampler) -> None:
        """The sampler of the run's training loader; a state that was loaded before is taken up now."""
        self.sampler = sampler
        sampler.on_start, sampler.on_end = self._on_start, self._say_what_was_trained
        if is_first_process():
            atexit.register(self._say_what_was_trained)
        if self._loaded is not None:
            self._resume(sampler, self._loaded)

    @property
    def accumulation(self) -> int:
        """Batches whose gradients make one update."""
        return max(int(getattr(self.accelerator, "gradient_accumulation_steps", 1) or 1), 1)

    def on_save(self, models: Any, weights: Any, output_dir: str) -> None:
        """accelerate's hook."""
        if self.sampler is not None and is_first_process():
            sampler = self.sampler
            position = sampler.position(self._batches())
            write_position(Path(output_dir), position, sampler.fingerprint, sampler.planner.focus)

    def on_load(self, models: Any, input_dir: str) -> None:
        """accelerate's hook; trainers load states before and after they make their loader."""
        if self.sampler is None:
            self._loaded = Path(input_dir)
        else:
            self._resume(self.sampler, Path(input_dir))

    def on_resumed(self, sampler: PlanSampler, point: ResumePoint, folder: Path) -> None:
        """The sampler stands where the state in `folder` was saved."""
        say_resumed(point)
        if self._caution and is_first_process():
            logger.info(self._caution.format(epoch=point.epoch))

    def on_no_place(self, sampler: PlanSampler, folder: Path, error: NoPlaceError) -> None:
        """The state in `folder` does not say at which image of this dataset it was saved."""
        say_no_place(error)

    def loss_scale(self) -> float:
        """What the mean loss of the batch that is trained now is multiplied by: see `EpochPlan.loss_scale`."""
        return 1.0 if self.sampler is None or self.accelerator is None else self.sampler.loss_scale(self._batches())

    def _batches(self) -> int:
        """Batches of the present epoch that each process has trained; 0 where it is complete."""
        step = int(self.accelerator.step)
        return step + self._uneven if step else 0

    def _say_what_was_trained(self) -> None:
        """When the next epoch begins, and when the program ends: not before, since workers read ahead."""
        if self._begun and self.sampler is not None and self.accelerator is not None and is_first_process():
            batches = self._batches()
            failed = hasattr(sys, "last_value")  # a traceback was printed
            if batches or (self.sampler.exhausted and not failed):
                logger.info("%s", self.sampler.summary(batches))
        self._begun = False

    def _resume(self, sampler: PlanSampler, folder: Path) -> None:
        self._loaded = None
        place = _place_of_all(sampler, folder)
        if isinstance(place, NoPlaceError):
            self.on_no_place(sampler, folder, place)
        elif isinstance(place, KohyaBucketError):  # the epoch's first images would be trained again
            end_run(str(place))
        else:
            self.on_resumed(sampler, sampler.resume(place), folder)

    def _on_start(self, first: int) -> None:
        # The accelerator counts the batches of an epoch; states are saved, and gradients accumulated, by it. With
        # another accumulation than before, the first batches may not make whole updates; the next update still does.
        self._begun = True
        self._uneven = first % self.accumulation
        if self.accelerator is not None:
            self.accelerator.step = first - self._uneven


# What trainers share that make their own `Accelerator`, and weigh their loss in its `backward`.


def _make_accelerator(seam: Replaced, self: Any, *args: Any, **kwargs: Any) -> None:
    seam.original(self, *args, **kwargs)
    seam.door.resume.watch(self)


def _backward(seam: Replaced, self: Any, loss: Any, **kwargs: Any) -> Any:
    scale = seam.door.resume.loss_scale()
    return seam.original(self, loss if scale == 1 else loss * scale, **kwargs)


RESUMING = (Seam("Accelerator", (Offers(Accelerator),)), Seam("Accelerator.__init__", (), _make_accelerator))
WEIGHING = (Seam("Accelerator.backward", (), _backward),)
