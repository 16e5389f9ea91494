"""What decides buckets: the protocol that every rule satisfies, and the class that this package's rules share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.decision import Decision
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import IntArray, as_sizes
from kohya_bucket.errors import KohyaBucketError

__all__ = ["BucketRule", "RuleBase", "SetRule", "check_rule", "place_one"]


@runtime_checkable
class BucketRule(Protocol):
    """What decides buckets. Every rule class (suffix `Buckets`) has these four."""

    @property
    def bucket_set(self) -> BucketSet | None:
        """The rule's whole set; None where the buckets follow from the images."""

    def place(self, sizes: Any) -> Placement:
        """Place N images; `sizes` is [N, 2] (width, height)."""

    def assign(self, width: int, height: int) -> Bucket:
        """Bucket of one image."""

    def assign_many_indices(self, sizes: Any) -> npt.NDArray[np.intp] | IntArray:
        """[N] bucket indices, -1 where an image has no bucket."""


class RuleBase(ABC):
    """A rule by one method, `_decide`; the four of `BucketRule` follow from it."""

    _bucket_set: BucketSet | None = None

    @abstractmethod
    def _decide(self, sizes: IntArray) -> Decision:
        """What becomes of N images; `sizes` is [N, 2] int32, rows with a side below 1 are unreadable."""

    @property
    def bucket_set(self) -> BucketSet | None:
        """The rule's whole set; None where the images themselves decide (`place(sizes).bucket_set` is what occurs)."""
        return self._bucket_set

    def place(self, sizes: npt.ArrayLike) -> Placement:
        """Place N images. `sizes` is [N, 2] (width, height) in pixels; rows with a side < 1 count as unreadable."""
        return self._decide(as_sizes(sizes)).placement()

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        return place_one(self, width, height)

    def assign_many_indices(self, sizes: npt.ArrayLike) -> IntArray:
        """[N] int32 positions in `bucket_set`, or where that is None in `place(sizes).bucket_set`; -1 for none."""
        return self._decide(as_sizes(sizes)).indices()


class SetRule(RuleBase):
    """A rule with a set of its own, whatever the images."""

    def __init__(self, bucket_set: BucketSet) -> None:
        self._bucket_set: BucketSet = bucket_set

    @property
    def bucket_set(self) -> BucketSet:
        return self._bucket_set


def check_rule(strategy: object) -> None:
    """Before headers are read: is this a rule at all?

    Raises:
        KohyaBucketError: it is a class, a bucket set, a name, or anything else that places no images.
    """
    if isinstance(strategy, type) or not callable(getattr(strategy, "place", None)):
        what = f"the class {strategy.__name__}" if isinstance(strategy, type) else repr(strategy)
        raise KohyaBucketError(
            f"strategy is {what}, but must be a rule, e.g. KohyaBuckets(1024), or FixedBuckets(bucket_set) for a set"
        )


def place_one(rule: BucketRule, width: int, height: int) -> Bucket:
    """Bucket of one image by the rule's own `place`: one code path for one image and for many."""
    placement = rule.place(as_sizes([(width, height)]))
    bucket = placement.bucket(0)
    if bucket is None:
        raise ValueError(f"an image of {width}x{height} has no bucket: {placement.reason(0).text}")
    return bucket
