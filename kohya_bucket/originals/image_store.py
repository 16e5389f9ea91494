"""An image store: the readable images of a folder, checked in parallel, to iterate over.

Source of the interface: lopho's "Simpler bucketing code" (image store with iteration and parallel validation).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
