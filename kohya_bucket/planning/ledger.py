"""The ledger: every image that an epoch does not train exactly as often as asked, where asked, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray


class LedgerReason(enum.IntEnum):
    """Why an image is trained other than asked."""

    NO_BUCKET = 1
    DROPPED = 2
    PADDED = 3
    RANK_FILLED = 4
    MERGED = 5
    CAUGHT = 6

    @property
    def text(self) -> str:
        return _TEXT[self]


_TEXT = {
    LedgerReason.NO_BUCKET: "it has no bucket",
    LedgerReason.DROPPED: "it was in the part of its bucket that did not fill a batch",
    LedgerReason.PADDED: "repeated to fill its bucket's last batch",
    LedgerReason.RANK_FILLED: "repeated so that no rank stays without an image",
    LedgerReason.MERGED: "trained in the next best bucket, since its own could not fill a batch",
    LedgerReason.CAUGHT: "trained at the base size, since its own bucket could not fill a batch",
}
_MOVED = {LedgerReason.MERGED: "trained in the next best bucket", LedgerReason.CAUGHT: "trained at the base size"}


@dataclass(frozen=True)
class Ledger:
    """Rows, sorted by reason and image; one for each training more, less or elsewhere than asked.

    Attributes:
        images: images in the dataset, with or without a bucket.
        asked: trainings asked of this epoch, all images together.
        image: [L] int32 image numbers.
        bucket: [L] int32, the bucket that it was asked in; -1 without one.
        to_bucket: [L] int32, where it is trained; equal to `bucket` unless it moved.
        delta: [L] int8, +1 trained once more than asked, -1 once less, 0 elsewhere.
        reason: [L] uint8 values of `LedgerReason`.
        bucket_sizes: [K, 2] for the text, or None.
        unreadable: trainings of images that turned out unreadable, which no row names; instead: those of them that
            another image of the bucket had.
    """

    images: int
    asked: int
    image: npt.NDArray[np.int32]
    bucket: npt.NDArray[np.int32]
    to_bucket: npt.NDArray[np.int32]
    delta: npt.NDArray[np.int8]
    reason: npt.NDArray[np.uint8]
    bucket_sizes: IntArray | None = None
    unreadable: int = 0
    instead: int = 0

    def __len__(self) -> int:
        return len(self.image)

    @property
    def missed(self) -> int:
        """Trainings asked for and not done."""
        return int(np.count_nonzero(self.delta < 0)) + self.unreadable

    @property
    def repeated(self) -> int:
        """Trainings done and not asked for."""
        return int(np.count_nonzero(self.delta > 0)) + self.instead

    @property
    def moved(self) -> int:
        """Trainings done in another bucket than asked."""
        return int(np.count_nonzero(self.delta == 0))

    @property
    def trained(self) -> int:
        """Trainings done by all ranks together."""
        return self.asked - self.missed + self.repeated

    def count(self, reason: LedgerReason) -> int:
        """Rows with that reason."""
        return int(np.count_nonzero(self.reason == reason))

    def bucket_name(self, k: int) -> str:
        """`640x384`, or `7` where the sizes are not known."""
        if self.bucket_sizes is None or k < 0:
            return str(k)
        width, height = self.bucket_sizes[k]
        return f"{width}x{height}"

    def rows(self) -> list[dict[str, int | str]]:
        """One dict per image, bucket and reason, with the sum of the deltas: for tables and JSON."""
        if len(self) == 0:
            return []
        keys = np.stack([self.image, self.bucket, self.to_bucket, self.reason], axis=1)
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        delta = np.bincount(inverse.reshape(-1), weights=self.delta)
        return [
            {
                "image": int(image),
                "bucket": self.bucket_name(int(bucket)),
                "trained_in": self.bucket_name(int(to)) if reason != LedgerReason.NO_BUCKET else "",
                "delta": int(d),
                "reason": LedgerReason(int(reason)).text,
            }
            for (image, bucket, to, reason), d in zip(unique, delta, strict=True)
        ]

    @property
    def text(self) -> str:
        """One line, e.g. `1,203 images, 0 missed, 3 repeated to fill bucket 640x384`."""
        trainings = "" if self.asked == self.images else f" asked {self.asked:,} times"
        images = f"{self.images:,} {'image' if self.images == 1 else 'images'}{trainings}"
        parts = [images, self._missed_text(), self._repeated_text()]
        parts += [f"{moved:,} {where}" for reason, where in _MOVED.items() if (moved := self.count(reason))]
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.text

    def _missed_text(self) -> str:
        why = [f"{self.unreadable:,} unreadable"] if self.unreadable else []
        if dropped := self.count(LedgerReason.DROPPED):
            why.append(f"{dropped:,} dropped with the remainder of {self._where(LedgerReason.DROPPED)}")
        if unplaced := self.count(LedgerReason.NO_BUCKET):
            why.append(f"{unplaced:,} without a bucket")
        return f"{self.missed:,} missed" + (f" ({', '.join(why)})" if why else "")

    def _repeated_text(self) -> str:
        padded, filled = self.count(LedgerReason.PADDED), self.count(LedgerReason.RANK_FILLED)
        if self.instead:
            more = f" and {padded + filled:,} to fill batches and ranks" if padded + filled else ""
            return f"{self.repeated:,} repeated ({self.instead:,} instead of unreadable ones{more})"
        if padded and filled:
            return f"{self.repeated:,} repeated ({padded:,} to fill batches, {filled:,} so that no rank is empty)"
        if padded:
            return f"{padded:,} repeated to fill {self._where(LedgerReason.PADDED)}"
        if filled:
            return f"{filled:,} repeated so that no rank is empty, to fill {self._where(LedgerReason.RANK_FILLED)}"
        return f"{self.repeated:,} repeated"

    def _where(self, reason: LedgerReason) -> str:
        buckets = np.unique(self.bucket[self.reason == reason])
        return f"bucket {self.bucket_name(int(buckets[0]))}" if len(buckets) == 1 else f"{len(buckets)} buckets"


Rows = npt.NDArray[np.void]
"""Rows of a ledger, with the columns of `Ledger`."""
NO_ROWS: Rows = np.zeros(0, [("image", "i4"), ("bucket", "i4"), ("to_bucket", "i4"), ("delta", "i1"), ("reason", "u1")])


def ledger_rows(
    image: npt.NDArray[np.int32], bucket: npt.ArrayLike, to_bucket: npt.ArrayLike, delta: int, reason: int = 0
) -> Rows:
    """Rows for one training each of some images, asked in `bucket` and done in `to_bucket`: one for each or all."""
    rows = np.empty(len(image), dtype=NO_ROWS.dtype)
    for name, values in zip(rows.dtype.names or (), (image, bucket, to_bucket, delta, reason), strict=True):
        rows[name] = values
    return rows
