"""The position in an epoch, saved as plain values and read back: on any number of ranks, in O(1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kohya_bucket.checks import integer, whole
from kohya_bucket.errors import PlanError, ResumeError
from kohya_bucket.planning.fingerprint import differences

STATE_VERSION = 2
_SEED_BITS = 128  # any integer is a seed, but a longer one is a damaged state
_DAMAGED = "the saved position is damaged"
_KEYS = ("version", "seed", "epoch", "step", "done", "fingerprint")


def is_position(value: Any) -> bool:
    """Whether it is a saved position, of whatever version."""
    return isinstance(value, Mapping) and all(key in value for key in _KEYS)


class OtherDataError(ResumeError):
    """A saved position is for other data or other options; `changed` says which, one text for each."""

    def __init__(self, where: str, changed: list[str]) -> None:
        self.changed = changed
        super().__init__(
            f"cannot resume at {where}: {'; '.join(changed)}. Images would be missed or repeated: restore the data and "
            "the settings, or start the epoch again"
        )


class TrainedPart(NamedTuple):
    """Steps of an epoch that were trained with one global batch: so many images, or [K] for the buckets.

    `ranks` is their number, where the plan depends on it (`PlanOptions.by_rank`).
    """

    global_batch: int | list[int]
    steps: int
    ranks: int | None = None


@dataclass(frozen=True)
class ResumePoint:
    """Where a resumed run begins: an epoch (counted as the trainer does, from 1), and batches of each process in it.

    Attributes:
        done: batches trained before.
        left: batches to be trained.
    """

    epoch: int
    done: int
    left: int


@dataclass(frozen=True)
class EpochPosition:
    """Where a run stands.

    Attributes:
        seed, epoch: of the plan.
        done: the epoch's parts that are trained, in order: one for each global batch that the epoch was trained
            with, normally one. The `done` of `plan_epoch`.
        begun_with: the step that was trained before all others, by its number in the plan's own order; None: the first.
    """

    seed: int
    epoch: int
    done: tuple[TrainedPart, ...] = ()
    begun_with: int | None = None

    @property
    def step(self) -> int:
        """Steps of the epoch that are trained."""
        return sum(part.steps for part in self.done)

    def at_step(self, step: int, global_batch: int | list[int], ranks: int | None = None) -> EpochPosition:
        """The position after `step` steps of the epoch, if all since the last change had this global batch.

        Raises:
            ResumeError: that lies before the point where the global batch last changed.
        """
        same = self.done and (self.done[-1].global_batch, self.done[-1].ranks) == (global_batch, ranks)
        parts = self.done[:-1] if same else self.done
        before = sum(part.steps for part in parts)
        if step < before:
            raise ResumeError(f"step {step} of epoch {self.epoch} lies before step {before}, where this run resumed")
        more = (TrainedPart(global_batch, step - before, ranks),) if step > before else ()
        return EpochPosition(self.seed, self.epoch, parts + more, self.begun_with if step else None)

    def next_epoch(self) -> EpochPosition:
        """The beginning of the epoch after this one."""
        return EpochPosition(self.seed, self.epoch + 1)

    def state_dict(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values, ready for JSON or torch.save, together with what they hold for."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "step": self.step,
            "done": [[size, steps] if ranks is None else [size, steps, ranks] for size, steps, ranks in self.done],
            **({} if self.begun_with is None else {"begun_with": self.begun_with}),
            "fingerprint": dict(fingerprint),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> EpochPosition:
        """Read a saved position, for the data and the options that `fingerprint` describes.

        The global batch may differ: what is left of the epoch is then planned again with the present one.

        Raises:
            OtherDataError: the state is for other data or options, with the differences.
            ResumeError: it is not a saved position, or of another version, or damaged.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(
                f"this is not a saved position but a {type(state).__name__}: give what state_dict() returned"
            )
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise ResumeError(f"this is not a saved position: {', '.join(missing)} is missing")
        if type(state["version"]) is not int or state["version"] != STATE_VERSION:
            raise ResumeError(
                f"the saved position has version {state['version']!r}, this release reads {STATE_VERSION}: "
                "resume with the release that saved it, or start the epoch again"
            )
        if not isinstance(state["fingerprint"], Mapping):
            raise ResumeError(f"{_DAMAGED}: its fingerprint is {state['fingerprint']!r}")
        try:
            changed = differences(state["fingerprint"], fingerprint, ignore=("global_batch",))
            parts = state["done"] if isinstance(state["done"], (list, tuple)) else [state["done"]]
            done = tuple(_part(size, steps, *ranks) for size, steps, *ranks in parts)
            first = None if (first := state.get("begun_with")) is None else whole("begun_with", first, 0)
            position = cls(_seed(state["seed"]), whole("epoch", state["epoch"], 0, bits=31), done, first)
            step = whole("step", state["step"], 0)
        except (TypeError, ValueError) as error:
            raise ResumeError(f"{_DAMAGED}: {error}") from error
        if step != position.step:
            raise ResumeError(f"{_DAMAGED}: step is {step}, but done holds {position.step}")
        if changed:
            raise OtherDataError(f"epoch {position.epoch}, step {position.step}", changed)
        return position


def _seed(value: Any) -> int:
    seed = integer("seed", value)
    if isinstance(value, bool) or seed.bit_length() > _SEED_BITS:
        raise PlanError(f"seed is {seed if seed.bit_length() < 256 else 'huge'}, which no run was saved with")
    return seed


def _part(global_batch: Any, steps: Any, ranks: Any = None) -> TrainedPart:
    sizes = global_batch if isinstance(global_batch, (list, tuple)) else [global_batch]
    checked = [whole("global batch", size, 1) for size in sizes]
    size = checked if sizes is global_batch else checked[0]
    return TrainedPart(size, whole("steps", steps, 0), None if ranks is None else whole("ranks", ranks, 1))
