"""An image number that says in which bucket the image is to be trained."""

from __future__ import annotations

from typing import Any

__all__ = ["PlannedIndex", "bucket_of"]


class PlannedIndex(int):
    """An int like any other, with `bucket`: position in the bucket set that the plan was made for.

    The sampler yields these where a plan trains images outside of their usual bucket (remainders "merge" and
    "catch_all") or in one of several (`resolutions`); a data set that ignores `bucket` would return images of
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
