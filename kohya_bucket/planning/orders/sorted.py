"""All batches of one bucket after those of another, by bucket number: the fewest changes of shape."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.batch_layout import BatchLayout
from kohya_bucket.planning.orders.order import Order

__all__ = ["FILE", "SORTED"]


def _order_sorted(cut: BatchLayout, rng: np.random.RandomState, run_length: int) -> npt.NDArray[np.intp]:  # noqa: ARG001
    """[S] numbers of the batches: as they were cut."""
    return np.arange(len(cut.bucket))


SORTED = Order("sorted", "bucket after bucket, images shuffled within", _order_sorted)
FILE = Order("file", "bucket after bucket, nothing shuffled, the same in every epoch", _order_sorted, shuffles=False)
