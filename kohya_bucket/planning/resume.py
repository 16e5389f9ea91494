"""The position in an epoch, saved as plain values and read back: on any number of ranks, in O(1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kohya_bucket.errors import ResumeError
from kohya_bucket.planning.fingerprint import differences

__all__ = ["STATE_VERSION", "Position"]

STATE_VERSION = 1
_DAMAGED = "the saved position is damaged"
_KEYS = ("version", "seed", "epoch", "step", "done", "fingerprint")


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    Attributes:
        seed, epoch: of the plan.
        done: (global batch, steps) of the epoch's parts that are trained, in order: one part for each global
            batch that the epoch was trained with, normally one. The `done` of `plan_epoch`.
    """

    seed: int
    epoch: int
    done: tuple[tuple[Any, int], ...] = ()

    @property
    def step(self) -> int:
        """Steps of the epoch that are trained."""
        return sum(steps for _, steps in self.done)

    def at_step(self, step: int, global_batch: Any) -> Position:
        """The position after `step` steps of the epoch, if all since the last change had this global batch.

        Raises:
            ResumeError: that lies before the point where the global batch last changed.
        """
        parts = self.done[:-1] if self.done and self.done[-1][0] == global_batch else self.done
        before = sum(steps for _, steps in parts)
        if step < before:
            raise ResumeError(f"step {step} of epoch {self.epoch} lies before step {before}, where this run resumed")
        more = ((global_batch, step - before),) if step > before else ()
        return Position(self.seed, self.epoch, parts + more)

    def state_dict(self, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
        """Plain values, ready for JSON or torch.save, together with what they hold for."""
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "step": self.step,
            "done": [[size, steps] for size, steps in self.done],
            "fingerprint": dict(fingerprint),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> Position:
        """Read a saved position, for the data and the settings that `fingerprint` describes.

        The global batch may differ: what is left of the epoch is then planned anew with the present one.

        Raises:
            ResumeError: the state is none, of another version, or for other data or settings; with the
                differences.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(
                f"this is no saved position but a {type(state).__name__}: give what state_dict() returned"
            )
        missing = [key for key in _KEYS if key not in state]
        if missing:
            raise ResumeError(f"this is no saved position: {', '.join(missing)} is missing")
        if state["version"] != STATE_VERSION:
            raise ResumeError(
                f"the saved position has version {state['version']}, this release reads {STATE_VERSION}: "
                "resume with the release that saved it, or start the epoch anew"
            )
        if not isinstance(state["fingerprint"], Mapping):
            raise ResumeError(f"{_DAMAGED}: its fingerprint is {state['fingerprint']!r}")
        changed = differences(state["fingerprint"], fingerprint, ignore=("global_batch",))
        if changed:
            raise ResumeError(
                f"cannot resume at epoch {state['epoch']}, step {state['step']}: {'; '.join(changed)}. Images would "
                "be missed or repeated: restore the data and the settings, or start the epoch anew"
            )
        try:
            done = tuple((size if isinstance(size, int) else list(size), int(steps)) for size, steps in state["done"])
            return cls(int(state["seed"]), int(state["epoch"]), done)
        except (TypeError, ValueError) as error:
            raise ResumeError(f"{_DAMAGED}: {error}") from error
