"""Numbers of items as loaders ask for them: plain, or with the bucket that an image is to be trained in.

Also which images may stand for one whose pixels cannot be read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.planning import EpochPlan

ON_BAD_IMAGE = ("leave_out", "stop")
"""What may become of an image that cannot be read: another of its bucket trains, or the run ends."""

_TRIES = 8  # of images in the place of another, each of which is read


class PlannedIndex(int):
    """An int like any other, with `bucket`: position in the bucket set that the plan was made for.

    The sampler yields these where a plan trains images outside of their usual bucket (remainders "merge" and
    "catch_all") or in one of several (`resolutions`); a dataset that ignores `bucket` would return images of
    different sizes for one batch. They survive the way into worker processes.
    """

    bucket: int

    def __new__(cls, index: int, bucket: int) -> PlannedIndex:
        made = super().__new__(cls, index)
        made.bucket = bucket
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (PlannedIndex, (int(self), self.bucket))


def bucket_of(index: int, default: int) -> int:
    """The bucket that an index asks for, or `default` for a plain int."""
    return index.bucket if isinstance(index, PlannedIndex) else default


def item_number(index: Any, n: int) -> int:
    """The number of an item, 0 to `n` - 1, from an index that may count from the end.

    Raises:
        KohyaBucketError: a whole batch of indices.
        IndexError: there is no such item.
    """
    if isinstance(index, (list, tuple)):
        raise KohyaBucketError(
            "an item is asked for by a list of numbers, which is a whole batch: write DataLoader(dataset, "
            "batch_sampler=sampler) in place of sampler=sampler"
        )
    number = operator.index(index)
    if not -n <= number < n:
        raise IndexError(f"item {number} of {n}")
    return number % n


def spare_images(images: npt.NDArray[Any], excluded: Iterable[int], seed: int) -> list[int]:
    """Images of a bucket to try in the place of one: a few that are not excluded, in an order that the seed decides."""
    others = np.setdiff1d(images, list(excluded))
    np.random.RandomState(seed & 0xFFFFFFFF).shuffle(others)
    tried: list[int] = others[:_TRIES].tolist()
    return tried


def rank_indices(plan: EpochPlan, rank: int) -> Iterator[list[int]]:
    """A rank's batches; where the plan moves images, of indices that say in which bucket they are trained."""
    batches = plan.rank_batches(rank)
    if not plan.moves:
        return batches
    buckets = plan.rank_buckets(rank).tolist()
    return ([PlannedIndex(i, k) for i in batch] for k, batch in zip(buckets, batches, strict=True))
