"""The same shape for several steps: torch.compile and cuDNN's autotuner meet fewer changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.batch_layout import BatchLayout
from kohya_bucket.planning.orders.order import Order
from kohya_bucket.planning.orders.shuffled import spread_evenly

__all__ = ["RUNS"]


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


RUNS = Order("runs", "several steps of one shape after another", _order_in_runs, heeds_run_length=True)
