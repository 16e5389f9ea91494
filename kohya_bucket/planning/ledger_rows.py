"""Rows of the ledger as they are collected while an epoch is planned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand import Change
from kohya_bucket.planning.ledger import LedgerReason

__all__ = ["LedgerRows"]


@dataclass(frozen=True)
class LedgerRows:
    """Parallel arrays; see `Ledger`."""

    image: npt.NDArray[np.int32]
    bucket: npt.NDArray[np.int32]
    to_bucket: npt.NDArray[np.int32]
    delta: npt.NDArray[np.int8]
    reason: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, changes: list[tuple[Change, LedgerReason]]) -> LedgerRows:
        """Rows of all changes, each with its reason."""
        none = np.zeros(0, dtype=np.int32)
        return cls(
            np.concatenate([none, *(c.image for c, _ in changes)]),
            np.concatenate([none, *(c.bucket for c, _ in changes)]),
            np.concatenate([none, *(c.to_bucket for c, _ in changes)]),
            np.concatenate([none, *(np.full(len(c.image), c.delta) for c, _ in changes)]).astype(np.int8),
            np.concatenate([none, *(np.full(len(c.image), why) for c, why in changes)]).astype(np.uint8),
        )

    def sorted(self) -> LedgerRows:
        """The same rows by reason and image."""
        order = np.lexsort((self.image, self.reason))
        image, bucket, to_bucket = self.image[order], self.bucket[order], self.to_bucket[order]
        return LedgerRows(image, bucket, to_bucket, self.delta[order], self.reason[order])

    def __add__(self, other: LedgerRows) -> LedgerRows:
        return LedgerRows(
            np.concatenate([self.image, other.image]),
            np.concatenate([self.bucket, other.bucket]),
            np.concatenate([self.to_bucket, other.to_bucket]),
            np.concatenate([self.delta, other.delta]),
            np.concatenate([self.reason, other.reason]),
        )
