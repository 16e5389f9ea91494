"""In which order an epoch's batches are trained. One way of arranging them per file."""

from kohya_bucket.planning.orders.local import LOCAL
from kohya_bucket.planning.orders.order import Order
from kohya_bucket.planning.orders.runs import RUNS
from kohya_bucket.planning.orders.shuffled import SHUFFLED
from kohya_bucket.planning.orders.sorted import FILE, SORTED

__all__ = ["ORDERS"]

ORDERS: dict[str, Order] = {order.name: order for order in (SHUFFLED, RUNS, LOCAL, SORTED, FILE)}
"""By name, as they are offered."""
