"""Bucketing switched off: one bucket for every image."""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.decision import InSet
from kohya_bucket.buckets.rule import SetRule
from kohya_bucket.buckets.sizes import IntArray

__all__ = ["OneBucket"]


class OneBucket(SetRule):
    """`enable_bucket = false`: every image goes to the dataset's resolution, whatever its aspect."""

    def __init__(self, resolution: tuple[int, int]) -> None:
        super().__init__(BucketSet.from_dims([resolution], name="no bucketing"))

    def _decide(self, sizes: IntArray) -> InSet:
        readable = sizes.min(axis=1, initial=1) > 0
        return InSet(sizes, self.bucket_set, np.where(readable, 0, -1).astype(np.int32))
