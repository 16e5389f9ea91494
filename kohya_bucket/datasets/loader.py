"""`bucketed_loader`: images, rule, batch size; all the rest has defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from torch.utils.data import DataLoader

from kohya_bucket.buckets import BucketRule
from kohya_bucket.datasets.images import BucketedDataset
from kohya_bucket.datasets.sampler import BucketBatchSampler
from kohya_bucket.errors import KohyaBucketError


def bucketed_loader(
    source: Any,
    rule: BucketRule | None = None,
    batch_size: npt.ArrayLike | None = 1,
    *,
    accelerator: Any = None,
    num_workers: int = 0,
    caption_column: str | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """A `DataLoader` of batches of one bucket each, shuffled anew in every epoch, on any number of processes.

    Its attribute `bucket_sampler` is the `BucketBatchSampler`: `plan()` of the epoch, `state_dict()`, `ledger()`.

    Args:
        source: a folder of images with `.txt` captions (or several, or a pattern or list file), a data set of Hugging
            Face's `datasets` with a column `image`, or a data set that has `bucket_indices`, such as
            `BucketedDataset` or `BucketedLatentDataset`.
        rule: where images go, e.g. `KohyaBuckets.for_arch("sdxl")`; None for a data set that has been placed.
        batch_size: images of one process in one step; a number or [K] per bucket; None with `max_pixels`.
        accelerator: of Hugging Face's accelerate, which prepares the loader.
        num_workers: processes that load images; they stay alive between epochs.
        caption_column: of a Hugging Face data set.
        options: of `BucketBatchSampler`, e.g. `seed=42`, `remainder="pad"`.

    Raises:
        KohyaBucketError: no images, or a rule where there must be none, or none where there must be one.
        TypeError: an option that does not exist, with the nearest one.
    """
    dataset = _dataset(source, rule, caption_column)
    sampler = BucketBatchSampler(dataset, batch_size, **options)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0
    )
    if accelerator is not None:
        loader = accelerator.prepare(loader)
    loader.bucket_sampler = sampler  # accelerate's wrapper hides its own
    return loader


def _dataset(source: Any, rule: BucketRule | None, caption_column: str | None) -> Any:
    if hasattr(source, "bucket_indices"):
        if rule is not None:
            raise KohyaBucketError(f"{type(source).__name__} has its buckets: leave the rule out")
        return source
    if rule is None:
        raise KohyaBucketError("no rule says where images go: give one, e.g. KohyaBuckets.for_arch('sdxl')")
    if isinstance(source, (str, os.PathLike, Sequence)):
        return BucketedDataset.from_folder(source, rule)
    return BucketedDataset.from_hf(source, rule, caption_column=caption_column)
