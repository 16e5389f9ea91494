"""What the trainers' rules share: one decision, and everything else follows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.decision import Decision, InSet, OwnSizes
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import RuleBase, SetRule
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.errors import BucketSettingsError

__all__ = ["DataTrainer", "SetTrainer", "SizeColumns", "decide_readable", "positive", "round_to_multiple"]

SizeColumns = tuple[npt.NDArray[np.number], npt.NDArray[np.number]]


def positive(**values: float) -> None:
    """Refuse values below 1 by name."""
    for name, value in values.items():
        if value < 1:
            raise BucketSettingsError(f"{name} is {value}, but must be 1 or more")


def round_to_multiple(x: float, multiple: int) -> int:
    """Python's `round(x / multiple) * multiple`: half to even."""
    return round(x / multiple) * multiple


class SetTrainer(SetRule):
    """A trainer with a bucket set; `_nearest` decides."""

    @abstractmethod
    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        """[N] readable widths and heights -> [N] positions in the set."""

    def _decide(self, sizes: IntArray) -> Decision:
        index = np.full(len(sizes), -1, dtype=np.int32)
        readable = sizes.min(axis=1, initial=1) > 0
        index[readable] = self._nearest(sizes[readable, 0], sizes[readable, 1])
        return InSet(sizes, self.bucket_set, index)


class DataTrainer(RuleBase):
    """A trainer whose buckets follow from the images; `_sizes` decides."""

    @abstractmethod
    def _sizes(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        """[N] readable widths and heights -> bucket widths and heights; 0 where the trainer has none."""

    def _decide(self, sizes: IntArray) -> OwnSizes:
        return decide_readable(sizes, self._sizes)


def decide_readable(sizes: IntArray, choose: Callable[[FloatArray, FloatArray], SizeColumns]) -> OwnSizes:
    """The bucket sizes that `choose` gives for the readable of N images."""
    readable = sizes.min(axis=1, initial=1) > 0
    buckets = np.zeros_like(sizes)
    buckets[readable] = np.stack(choose(*sizes[readable].T.astype(np.float64)), axis=1)
    reasons: npt.NDArray[np.uint8] = np.where(readable, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
    reasons[readable & (buckets.min(axis=1, initial=1) < 1)] = Reason.TOO_SMALL
    return OwnSizes(sizes, buckets, reasons)
