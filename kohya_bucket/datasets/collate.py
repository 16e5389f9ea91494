"""Let torch's own `default_collate` put items into batches, so that no `collate_fn` is needed.

`torch.utils.data.default_collate` has a table of functions by type which is meant to be extended (its
documentation, "Option 2"). In it are a `Bucket`, of which a batch stays a list; an `Item`, so that images of
different sizes are refused with the reason; and a `Batch`, which is complete and must not be batched again.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch.utils.data._utils.collate import collate, default_collate_fn_map

from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.errors import KohyaBucketError

__all__ = ["Batch", "Item", "register_bucket_collation"]


class Item(dict[str, Any]):
    """One image of a data set with all that belongs to it."""


class Batch(dict[str, Any]):
    """A batch that a stream has put together."""


def register_bucket_collation() -> None:
    """Make `default_collate` know these types; done wherever a dataset is defined or unpickled."""
    default_collate_fn_map[Bucket] = _as_list
    default_collate_fn_map[Item] = _together
    default_collate_fn_map[Batch] = _refuse_batches


def _as_list(batch: list[Any], *, collate_fn_map: Any = None) -> list[Any]:  # noqa: ARG001
    return list(batch)


def _together(batch: list[Item], *, collate_fn_map: Any = None) -> dict[str, Any]:
    first = batch[0]
    for other in batch[1:]:
        shape, another = (getattr(item["image"], "shape", None) for item in (first, other))
        if shape == another or shape is None or another is None:
            continue
        if first["bucket"] != other["bucket"]:
            raise KohyaBucketError(
                f"one batch holds {first['path']} of bucket {first['bucket']} and {other['path']} of bucket "
                f"{other['bucket']}: images of different buckets cannot be stacked, so draw batches with "
                "DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, batch_size=...))"
            )
        raise KohyaBucketError(
            f"transform returned shape {list(shape)} for {first['path']} and {list(another)} for {other['path']}, both "
            f"of bucket {first['bucket']}: images of a batch cannot be stacked unless it keeps shapes equal in a bucket"
        )
    return {name: collate([item[name] for item in batch], collate_fn_map=collate_fn_map) for name in first}


def _refuse_batches(batch: list[Batch], *, collate_fn_map: Any = None) -> NoReturn:  # noqa: ARG001
    raise KohyaBucketError("this stream yields whole batches already: use DataLoader(stream, batch_size=None)")
