"""Batches of all buckets mixed at random, with each bucket spread evenly over the epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.batch_layout import BatchLayout
from kohya_bucket.planning.orders.order import Order
from kohya_bucket.planning.stream import packed_order

__all__ = ["SHUFFLED", "order_shuffled", "spread_evenly"]


def order_shuffled(cut: BatchLayout, rng: np.random.RandomState, run_length: int) -> npt.NDArray[np.intp]:  # noqa: ARG001
    """[S] numbers of the batches in the order of training; see `spread_evenly` for what holds."""
    return spread_evenly(cut.bucket, cut.turn, cut.per_bucket, rng)


def spread_evenly(
    bucket: npt.NDArray[np.int32],
    turn: npt.NDArray[np.int64],
    per_bucket: npt.NDArray[np.int64],
    rng: np.random.RandomState,
) -> npt.NDArray[np.intp]:
    """Mix S units at random so that no bucket bunches up.

    The epoch is the interval [0, 1). A bucket with m units puts one at a random place in each of m equal
    parts, and all are sorted. Which unit gets the first part is drawn too, so that the short batch of a bucket
    is not always its last; the others follow in their order, round the circle.

    What follows for every start of the epoch, with K buckets that have units: after t of S units, bucket k has
    been trained within `1 + K*m/S` of its even share t*m/S. So a bucket with no more than the average share
    (m <= S/K) is never two units off.
    """
    first = np.floor(rng.random_sample(len(per_bucket)) * per_bucket).astype(np.int64)
    total = per_bucket[bucket]
    part = (turn + first[bucket]) % np.maximum(total, 1)
    places = (part + rng.random_sample(len(bucket))) / np.maximum(total, 1)
    return packed_order(np.minimum(places, 1 - 2**-40))


SHUFFLED = Order("shuffled", "batches of all buckets mixed, each bucket spread evenly", order_shuffled)
