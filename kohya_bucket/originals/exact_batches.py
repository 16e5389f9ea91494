"""lopho's batches: bucket after bucket, shuffled only when asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import as_flag
from kohya_bucket.errors import PlanError


def exact_batches(
    bucket_index: Any,
    batch_size: int,
    *,
    shuffle_samples: bool = False,
    shuffle_batches: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> Iterator[npt.NDArray[np.int64]]:
    """Rows of each batch; every batch is of one bucket. A pure function of its arguments.

    Args:
        bucket_index: [N] bucket of each image; -1 is left out.
        shuffle_samples: shuffle the images within their bucket, otherwise they keep their order.
        shuffle_batches: shuffle the order of batches, otherwise buckets follow in their order.
        drop_last: leave out what does not fill a batch, otherwise a bucket's last batch may be shorter.

    Raises:
        PlanError: a batch size below 1, or an option that is neither on nor off.
    """
    if batch_size < 1:
        raise PlanError(f"batch_size is {batch_size}, but must be 1 or more")
    shuffle_samples = as_flag("shuffle_samples", shuffle_samples, PlanError)
    shuffle_batches = as_flag("shuffle_batches", shuffle_batches, PlanError)
    drop_last = as_flag("drop_last", drop_last, PlanError)
    buckets = np.asarray(bucket_index)
    random = np.random.Generator(np.random.PCG64([seed, epoch]))
    batches: list[npt.NDArray[np.int64]] = []
    for bucket in range(int(buckets.max(initial=-1)) + 1):
        rows = np.flatnonzero(buckets == bucket)
        if shuffle_samples:
            random.shuffle(rows)
        stop = len(rows) - len(rows) % batch_size if drop_last else len(rows)
        batches += [rows[start : start + batch_size] for start in range(0, stop, batch_size)]
    order = random.permutation(len(batches)) if shuffle_batches else range(len(batches))
    return (batches[i] for i in order)
