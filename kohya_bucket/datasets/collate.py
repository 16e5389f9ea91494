"""Let torch's own `default_collate` put buckets into batches, so that no `collate_fn` is needed.

`torch.utils.data.default_collate` has a table of functions by type which is meant to be extended (its
documentation, "Option 2"). A `Bucket` is added to it: a batch of them stays a list of them.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data._utils.collate import default_collate_fn_map

from kohya_bucket.buckets.types import Bucket

__all__ = ["register_bucket_collation"]


def register_bucket_collation() -> None:
    """Make `default_collate` turn buckets into a list; done wherever a dataset is defined or unpickled."""
    default_collate_fn_map[Bucket] = _as_list


def _as_list(batch: list[Any], *, collate_fn_map: Any = None) -> list[Any]:  # noqa: ARG001
    return list(batch)
