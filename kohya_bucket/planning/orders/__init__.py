"""In which order an epoch's batches are trained. One order per file, each `(cut, rng, run_length) -> [S]`."""

from kohya_bucket.planning.orders.runs import order_in_runs
from kohya_bucket.planning.orders.shuffled import order_shuffled
from kohya_bucket.planning.orders.sorted import order_sorted

__all__ = ["ORDERS", "order_in_runs", "order_shuffled", "order_sorted"]

ORDERS = {
    "shuffled": order_shuffled,
    "runs": order_in_runs,
    "sorted": order_sorted,
    "file": order_sorted,
}
