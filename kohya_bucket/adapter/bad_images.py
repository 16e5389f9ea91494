"""Images that turn out unreadable while a run trains: counted where all processes of a loader see it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from multiprocessing.sharedctypes import RawArray

import numpy as np
import numpy.typing as npt

__all__ = ["BadImages", "counted_here"]


class BadImages:
    """How often each image of a group could not be read; a loader's workers and its trainer share the numbers.

    Args:
        first_image: [D + 1] number of each dataset's first image in the group, and of all images.
    """

    def __init__(self, first_image: Sequence[int]) -> None:
        self._first = [int(number) for number in first_image]
        self._shared = RawArray(ctypes.c_int32, self._first[-1] + 1)  # the last one: all together

    def note(self, dataset: int, image: int) -> None:
        """An image of a dataset could not be read."""
        self._shared[self._first[dataset] + image] += 1
        self._shared[self._first[-1]] += 1

    def __bool__(self) -> bool:
        return self.total > 0

    @property
    def total(self) -> int:
        """How often so far, all images together."""
        return int(self._shared[self._first[-1]])

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[N] how often so far, by an image's number in the group; a copy."""
        return np.array(self._shared[: self._first[-1]], dtype=np.int32)

    def count_here(self) -> None:
        """Let what is read in this process from now on be counted here."""
        _here[:] = [self]


_here: list[BadImages] = []


def counted_here() -> BadImages | None:
    """Where this process counts; None where no plan has been drawn from."""
    return _here[0] if _here else None
