"""The loaders of a run: each rank's share of the plan, and where it stands when a checkpoint is saved."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader

from kohya_bucket.checks import is_first_process
from kohya_bucket.datasets.agreement import gather, world
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.planning import EpochPosition
from kohya_bucket.planning.resume import OtherDataError
from kohya_bucket.texts import parse_json, read_text
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.config_source import parse_yaml
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.resume import say_no_place, say_resumed
from kohya_bucket.trainers.door.sampler import PlanSampler

IN_INFO = "kohya_bucket"
"""Key of a checkpoint's `training_info` under which the positions of the run's loaders stand."""

PLACE = ("step_num", "epoch_num", "start_step")
"""Attributes of a trainer's process: where it stands, and where it began."""

logger = logging.getLogger("kohya_bucket")


class RankSampler(PlanSampler):
    """A rank's own batches, since nothing deals ai-toolkit's loader out to ranks; each iteration is the next epoch."""

    def __init__(self, planner: GroupPlanner, seed: int) -> None:
        super().__init__(planner, seed, SimpleNamespace(value=1))
        self._iterated = False

    def __len__(self) -> int:
        return super().__len__() // self.world_size

    @property
    def batches(self) -> int:
        """Of this rank in the whole of the present epoch, what was trained before a resume included."""
        return self._current.first_step + self._current.steps

    def __iter__(self) -> Iterator[PlannedBatch]:  # begins when it is drawn from: loaders make one that they never use
        assert self.current_epoch is not None
        self.current_epoch.value += self._iterated
        self._iterated = True
        yield from islice(super().__iter__(), self._rank, None, self.world_size)


class PlannedLoader:
    """A loader that draws from a plan, and knows how many batches the trainer has taken of it.

    What is asked of it besides is the loader's.
    """

    def __init__(self, loader: DataLoader[Any], sampler: RankSampler) -> None:
        self.loader, self.sampler = loader, sampler
        self.taken = 0  # of the present epoch
        self._told = True
        sampler.on_start, sampler.on_end = self._begin, self._say_what_was_trained
        if is_first_process():
            atexit.register(self._say_what_was_trained)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.taken, self._told = self.taken + 1, False
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, as plain values."""
        sampler = self.sampler
        position = sampler.position(self.taken) if self.taken else EpochPosition(sampler.seed, sampler.epoch)
        return position.state_dict(sampler.fingerprint)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was saved, or say why the epoch begins again."""
        try:
            say_resumed(self.sampler.resume(EpochPosition.from_state_dict(state, self.sampler.fingerprint)))
        except OtherDataError as error:
            changed = "; ".join(error.changed)
            say_no_place(f"the datasets or their options changed since the checkpoint was saved ({changed})")
        except KohyaBucketError as error:
            say_no_place(error)

    def _begin(self, first: int) -> None:
        self.taken = first

    def _say_what_was_trained(self) -> None:
        if not self._told and is_first_process():
            logger.info("%s", self.sampler.summary(self.taken % self.sampler.batches))
        self._told = True


class RunningJob:
    """A training of a job: its loaders by name, until the next job of the program begins."""

    def __init__(self) -> None:
        self.loaders: dict[str, PlannedLoader] = {}

    def loss_scale(self) -> float:
        """What the mean loss of the batch that is trained now is multiplied by: see `EpochPlan.loss_scale`."""
        main = self.loaders.get("datasets")
        return 1.0 if main is None else main.sampler.loss_scale(main.taken)

    def add(self, name: str, loader: PlannedLoader, process: Any) -> None:
        """Let a loader of a trainer's process begin where the newest checkpoint was saved, and be in the next ones."""
        if name in self.loaders or not self.loaders:
            self.loaders.clear()
            _save_with(process, self.loaders)
        self.loaders[name] = loader
        states = [_saved_with(process, name)]
        if loader.sampler.world_size > 1:
            states = [one.get("state") for one in gather({"state": states[0]})]  # only the first rank reads checkpoints
        if states[0] is not None:
            loader.resume(states[0])


def go_on_together(process: Any) -> None:
    """Let all ranks begin at the step of the first, which alone is told by ai-toolkit where a checkpoint was saved.

    Each counts its own steps: the others would train all of the first ones again, and wait for one that has ended.
    """
    if world()[0] > 1 and all(hasattr(process, name) for name in PLACE):
        first = gather({name: getattr(process, name) for name in PLACE})[0]
        for name, value in first.items():
            setattr(process, name, value)


def _save_with(process: Any, loaders: Mapping[str, PlannedLoader]) -> None:
    tell = process.get_training_info

    def get_training_info() -> Any:
        info = tell()
        info[IN_INFO] = {name: loader.state_dict() for name, loader in loaders.items()}
        return info

    process.get_training_info = get_training_info


def _saved_with(process: Any, name: str) -> Mapping[str, Any] | None:
    """What the checkpoint that the process goes on from says of a loader; None where it begins again."""
    if not process.step_num or not is_first_process():
        return None
    path = Path(process.get_latest_save_path() or "")
    info = _training_info(path)
    if info.get("step") != process.step_num:
        why = f"step {info.get('step')}" if info else "no step"
        say_no_place(f"{path}: it was saved at {why}, and the run goes on at step {process.step_num}")
        return None
    state = _table(_table(info.get(IN_INFO)).get(name))
    if not state:
        say_no_place(f"{path} was saved without kohya_bucket")
    return state or None


def _training_info(path: Path) -> Mapping[str, Any]:
    """What ai-toolkit writes of a run into a LoRA's metadata, or beside a model in a folder; empty if there is none."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.is_dir():
            info = _table(parse_yaml(read_text(path / "aitk_meta.yaml"))).get("training_info")
        else:
            with safe_open(path, framework="np") as file:
                info = parse_json((file.metadata() or {}).get("training_info", "{}"))
    except (OSError, ValueError, SafetensorError):  # it holds no weights, or ai-toolkit's own reading says so
        return {}
    return _table(info)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
