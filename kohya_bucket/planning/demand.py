"""What an epoch is asked to train, and the order in which batches are cut from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.planning.stream import packed_order

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

    @property
    def trainings(self) -> int:
        """Trainings asked in all."""
        return len(self.image) if self.times is None else int(self.times.sum())

    def all_times(self) -> npt.NDArray[np.int64]:
        """[M] times, also where they are once each."""
        return np.ones(len(self.image), dtype=np.int64) if self.times is None else self.times

    def changed(self, rows: Ints, by: int | Ints) -> Demand:
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


def smallest_ids(bucket: Ints, n_buckets: int) -> Ints:
    """Bucket numbers as 8- or 16-bit where they fit: numpy sorts those stably by radix, many times faster."""
    if n_buckets <= 1 << 8:
        return bucket.astype(np.uint8, copy=False)
    if n_buckets <= 1 << 16:
        return bucket.astype(np.uint16, copy=False)
    return bucket.astype(np.int32, copy=False)


def sequence_items(
    demand: Demand, rng: np.random.RandomState, *, shuffle: bool, parts: npt.NDArray[np.int32] | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """All trainings of an epoch: ([T] image numbers, bucket after bucket; [K] how many of each bucket).

    Images that are trained once stand in random order within their bucket. Where images are trained several
    times, each image's trainings are spread evenly: the j-th of c lies at a random place in the j-th of c
    equal parts of its bucket. Without `shuffle`, images stand in the order of their rows, repeats adjacent.
    With `parts`, [N] by image, the same holds within each part, and a bucket's parts follow each other.
    """
    bucket = smallest_ids(demand.bucket, demand.n_buckets)
    group: Ints = bucket
    if parts is not None:
        group = _numbered_pairs(bucket, demand.n_buckets, demand.of_rows(parts))
    times = demand.times
    if times is None:
        items = _stable_order(group)
        counts = np.bincount(bucket, minlength=demand.n_buckets).astype(np.int64)
        # How many items each group has, in their order: they are shuffled within it.
        lengths = counts if parts is None else _run_lengths(group[items])
        if not demand.rows_are_images:
            items = demand.image[items].astype(np.intp)  # before they are shuffled: memory is read in order then
        if shuffle:
            ends = np.cumsum(lengths)
            for k in np.flatnonzero(lengths):
                rng.shuffle(items[ends[k] - lengths[k] : ends[k]])
        return items.astype(np.int32), counts
    rows = np.repeat(np.arange(len(times)), times)
    counts = np.bincount(bucket[rows], minlength=demand.n_buckets).astype(np.int64)
    if shuffle:
        turn = runs(times)
        # A hair below 1, so that rounding never lifts the last part out of [0, 1).
        places = np.minimum((turn + rng.random_sample(len(rows))) / times[rows], 1 - 2**-40)
        order = rows[packed_order(places, group[rows])]
    else:
        order = rows[_stable_order(group[rows])]
    return demand.image[order], counts


def _numbered_pairs(bucket: Ints, n_buckets: int, part: Ints) -> Ints:
    """[M] numbers that sort by (bucket, part): those of the pairs that occur, which mostly fit into 16 bits."""
    n_parts = int(part.max(initial=0)) + 1
    pairs = n_buckets * n_parts
    kind = np.int32 if pairs < 1 << 31 else np.int64
    key: Ints = np.multiply(bucket, n_parts, dtype=kind)
    key += part
    if not 1 << 16 < pairs < max(1 << 20, len(key)):
        return smallest_ids(key, pairs) if pairs <= 1 << 16 else key
    occurs = np.zeros(pairs, dtype=np.bool_)
    occurs[key] = True
    number = np.cumsum(occurs, dtype=np.int32) - np.int32(1)
    return smallest_ids(number, int(number[-1]) + 1)[key]


def _stable_order(ids: Ints) -> npt.NDArray[np.intp]:
    """`np.argsort(ids, kind="stable")` of numbers from 0, 16 bits at a time: numpy has a radix sort for so many."""
    highest = int(ids.max(initial=0))
    order = np.argsort(smallest_ids(ids & 0xFFFF if highest >> 16 else ids, min(highest + 1, 1 << 16)), kind="stable")
    for shift in range(16, highest.bit_length(), 16):
        digit = (ids[order] >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit, kind="stable")]
    return order


def _run_lengths(ids: Ints) -> npt.NDArray[np.int64]:
    """How often each id stands there; equal ones are neighbours."""
    begins = np.flatnonzero(ids[1:] != ids[:-1]) + 1
    return np.diff(begins, prepend=0, append=len(ids)).astype(np.int64) if len(ids) else np.zeros(0, dtype=np.int64)
