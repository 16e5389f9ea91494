"""In which order an epoch's batches are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.batches import BatchLayout
from kohya_bucket.planning.stream import packed_order


@dataclass(frozen=True)
class Order:
    """In which order an epoch's batches are trained.

    Attributes:
        name: in options, configs and saved states.
        text: for help and documentation.
        arrange: `(layout, rng, run_length) -> [S]` numbers of the batches, in the order of training.
        shuffles: the images of a bucket are shuffled before batches are cut; without, every epoch is the same.
        uses_run_length: `run_length` decides what it does.
        uses_shards: `shards` and `open_shards` decide in which windows images are trained; `arrange` then sees the
            batches that a bucket has in one window as a bucket of their own.
    """

    name: str
    text: str
    arrange: Callable[[BatchLayout, np.random.RandomState, int], npt.NDArray[np.intp]]
    shuffles: bool = True
    uses_run_length: bool = False
    uses_shards: bool = False


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


def _order_in_runs(cut: BatchLayout, rng: np.random.RandomState, run_length: int) -> npt.NDArray[np.intp]:
    """[S] numbers of the batches in the order of training.

    Each bucket's batches are bound into runs of `run_length`, the last run taking the rest and ending with the
    short batch if there is one; the runs are then mixed and spread as single batches are in `shuffled`.
    """
    runs = -(-cut.per_bucket // run_length)
    bucket = np.repeat(np.arange(len(runs), dtype=np.int32), runs)
    before = np.cumsum(runs) - runs
    turn = np.arange(len(bucket), dtype=np.int64) - before[bucket]
    rank = np.empty(len(bucket), dtype=np.int64)
    rank[spread_evenly(bucket, turn, runs, rng)] = np.arange(len(bucket))
    run_of_step = before[cut.bucket] + cut.turn // run_length
    return np.argsort(rank[run_of_step], kind="stable")


def _order_sorted(cut: BatchLayout, rng: np.random.RandomState, run_length: int) -> npt.NDArray[np.intp]:  # noqa: ARG001
    """[S] numbers of the batches: as they were cut."""
    return np.arange(len(cut.bucket))


def with_largest_first(bucket: npt.NDArray[np.int32], cost: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """[S] numbers of the steps, with the costliest of each bucket at the head, the costliest of all first.

    Args:
        bucket, cost: [S, W] what each rank trains in a step, and what it costs.
    """
    falling = np.argsort(-cost.ravel(), kind="stable")
    _, first = np.unique(bucket.ravel()[falling], return_index=True)
    head = list(dict.fromkeys((falling[np.sort(first)] // bucket.shape[1]).tolist()))
    return np.concatenate([np.array(head, dtype=np.intp), np.setdiff1d(np.arange(len(bucket)), head)])


ORDERS: dict[str, Order] = {
    order.name: order
    for order in (
        Order("shuffled", "batches of all buckets mixed, each bucket spread evenly", order_shuffled),
        Order("runs", "several steps of one shape after another", _order_in_runs, uses_run_length=True),
        Order(
            "local", "few shards at a time, in random order, images and batches mixed among them", order_shuffled,
            uses_shards=True,
        ),
        Order("sorted", "bucket after bucket, images shuffled within", _order_sorted),
        Order("file", "bucket after bucket, nothing shuffled, the same in every epoch", _order_sorted, shuffles=False),
    )
}  # fmt: skip
"""By name, as they are offered."""
