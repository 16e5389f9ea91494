"""Which shard each item of a data set lies in, for the orders that go by it."""

from __future__ import annotations

from typing import Any

from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.planning import ORDERS, PlanOptions
from kohya_bucket.planning.options import PlanKeywords

__all__ = ["with_shards"]


def with_shards(options: PlanKeywords, dataset: Any) -> PlanKeywords:
    """The options with the data set's own shards, where the order goes by shards and none are given."""
    order = ORDERS.get(options.get("order", ""))
    if order is None or not order.heeds_shards or options.get("shards") is not None:
        return options
    for holder in (dataset, getattr(dataset, "source", None)):
        if (shards := getattr(holder, "shards", None)) is not None:
            if isinstance(store := getattr(holder, "store", None), LatentStore):
                store.keep_shards(options.get("open_shards", PlanOptions.open_shards))
            return {**options, "shards": shards}
    return options
