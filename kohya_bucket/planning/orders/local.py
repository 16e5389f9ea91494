"""Shards are read one after another: for data that lies in object storage, or anywhere else where reading at random is
slow."""

from __future__ import annotations

from kohya_bucket.planning.orders.order import Order
from kohya_bucket.planning.orders.shuffled import order_shuffled

__all__ = ["LOCAL"]

LOCAL = Order(
    "local", "few shards at a time, in random order, images and batches mixed among them", order_shuffled,
    heeds_shards=True,
)  # fmt: skip
