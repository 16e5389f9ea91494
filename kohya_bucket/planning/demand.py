"""What an epoch is asked to train, as rows of (image, bucket, times)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Change", "Demand"]

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Demand:
    """Rows of images to train; an image may have several rows (in several buckets), each with its own times.

    Attributes:
        image: [M] image numbers.
        bucket: [M] bucket of each row, 0 or more.
        times: [M] how often to train it there; None stands for once each.
        n_buckets: K.
    """

    image: npt.NDArray[np.int32]
    bucket: Ints
    times: npt.NDArray[np.int64] | None
    n_buckets: int

    @cached_property
    def rows_are_images(self) -> bool:
        """Whether row i is image i, so that `values[demand.image]` is `values`."""
        image, n = self.image, len(self.image)
        return n == 0 or bool(image[0] == 0 and image[-1] == n - 1 and (image[1:] > image[:-1]).all())

    def of_rows(self, of_images: Ints) -> Ints:
        """[M] what `of_images`, [N], says of each row's image; maybe the same array."""
        return of_images[: len(self.image)] if self.rows_are_images else of_images[self.image]

    def per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] trainings asked of each bucket."""
        if self.times is None:
            return np.bincount(self.bucket, minlength=self.n_buckets).astype(np.int64)
        return np.bincount(self.bucket, weights=self.times, minlength=self.n_buckets).astype(np.int64)

    def all_times(self) -> npt.NDArray[np.int64]:
        """[M] times, also where they are once each."""
        return np.ones(len(self.image), dtype=np.int64) if self.times is None else self.times

    def changed(self, rows: Ints, by: Ints) -> Demand:
        """The demand with `times[rows]` changed by `by`; a row may occur several times."""
        times = self.all_times().copy()
        np.add.at(times, rows, by)
        return Demand(self.image, self.bucket, times, self.n_buckets)

    def extended(self, image: Ints, bucket: Ints) -> Demand:
        """The demand with each `image[i]` asked once more, in `bucket[i]`."""
        return Demand(
            np.concatenate([self.image, image]).astype(np.int32),
            np.concatenate([self.bucket, bucket.astype(self.bucket.dtype)]),
            np.concatenate([self.all_times(), np.ones(len(image), dtype=np.int64)]),
            self.n_buckets,
        )


@dataclass(frozen=True)
class Change:
    """What a policy changes about one training each of some images: rows for the ledger.

    Attributes:
        image, bucket: [C] the images, and the buckets they were asked in.
        to_bucket: [C] where they are trained instead; equal to `bucket` unless they were moved.
        delta: +1 trained once more than asked, -1 once less, 0 only moved.
    """

    image: npt.NDArray[np.int32]
    bucket: npt.NDArray[np.int32]
    to_bucket: npt.NDArray[np.int32]
    delta: int
