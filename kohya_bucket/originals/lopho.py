"""lopho's image store, the readable images of a folder, checked in parallel; and its batches, bucket after bucket.

Source of the interface: lopho's "Simpler bucketing code" (image store with iteration and parallel validation).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import as_flag
from kohya_bucket.errors import PlanError
from kohya_bucket.images.listing import list_images
from kohya_bucket.images.sizes import read_sizes


class StoredImage(NamedTuple):
    """Position in the store, path, and size in pixels."""

    position: int
    path: str
    width: int
    height: int


class ImageStore:
    """Images by position; files that cannot be read are left out and listed in `failures`.

    Args:
        source: a folder, or the paths themselves.
        validate: decode every image whole, to find the files whose header is fine and whose pixels are not.
        recursive: look into subfolders of a folder.
        workers: at most this many threads or processes for reading and checking.

    Attributes:
        paths: of the images that passed.
        sizes: [N, 2] int32 (width, height), unrotated.
        failures: (path, reason) of the files that did not.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        validate: bool = False,
        recursive: bool = True,
        workers: int | None = None,
    ) -> None:
        if isinstance(source, (str, os.PathLike)):
            paths = list(list_images(source, recursive=recursive))
        else:
            paths = [os.fspath(path) for path in source]
        scan = read_sizes(paths, verify=validate, workers=workers)
        self.failures = [(path, reason) for _, path, reason in scan.failures]
        good = scan.readable
        self.paths: Sequence[str] = [paths[i] for i in np.flatnonzero(good)]
        self.sizes: npt.NDArray[np.int32] = scan.sizes[good]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> StoredImage:
        width, height = self.sizes[index].tolist()
        return StoredImage(range(len(self))[index], self.paths[index], width, height)

    def __iter__(self) -> Iterator[StoredImage]:
        return (self[i] for i in range(len(self)))


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
