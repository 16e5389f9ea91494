"""What an order of an epoch's batches is: a value that says everything that is to be known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.batch_layout import BatchLayout

__all__ = ["Order"]


@dataclass(frozen=True)
class Order:
    """In which order an epoch's batches are trained.

    Attributes:
        name: in options, configs and saved states.
        text: for help and documentation.
        arrange: `(layout, rng, run_length) -> [S]` numbers of the batches, in the order of training.
        shuffles: the images of a bucket are shuffled before batches are cut; without, every epoch is the same.
        heeds_run_length: `run_length` decides what it does.
        heeds_shards: `shards` and `open_shards` decide in which windows images are trained; `arrange` then sees the
            batches that a bucket has in one window as a bucket of their own.
    """

    name: str
    text: str
    arrange: Callable[[BatchLayout, np.random.RandomState, int], npt.NDArray[np.intp]]
    shuffles: bool = True
    heeds_run_length: bool = False
    heeds_shards: bool = False
