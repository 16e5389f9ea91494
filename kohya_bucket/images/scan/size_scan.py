"""What the headers of many files say."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.formats import ImageFormat, format_of_extension
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.pool import Engine

__all__ = ["KeptSizes", "ScanInterrupted", "SizeScan"]


@dataclass(frozen=True)
class SizeScan:
    """What the headers of N files say, as columns; row i belongs to the i-th path.

    Attributes:
        paths: the N paths, as text.
        sizes: [N, 2] int32 pixels (width, height) as stored, unrotated; (0, 0) where unreadable.
        orientation: [N] uint8 EXIF orientation 1 to 8; 1 is upright, 5 to 8 swap the sides when obeyed.
        formats: [N] uint8 values of `ImageFormat`, by content.
        failures: (index, path, reason) of each unreadable file, by index.
        read: [N] bool, False for files that an interrupted scan did not reach.
        engine: what the scan ran on: "alone", "threads" or "processes"; several if it changed on the way.
    """

    paths: Sequence[str]
    sizes: npt.NDArray[np.int32]
    orientation: npt.NDArray[np.uint8]
    formats: npt.NDArray[np.uint8]
    failures: list[tuple[int, str, str]]
    read: npt.NDArray[np.bool_]
    engine: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the file has a size."""
        return np.asarray(self.sizes[:, 0] > 0)

    def rotated(self) -> npt.NDArray[np.intp]:
        """Indices of images whose EXIF asks for a rotation or mirroring; sd-scripts loads them without."""
        return np.flatnonzero(self.orientation > 1)

    def upright_sizes(self) -> npt.NDArray[np.int32]:
        """[N, 2] sizes after obeying EXIF: sides swapped where the orientation is 5 to 8."""
        return np.where((self.orientation >= 5)[:, None], self.sizes[:, ::-1], self.sizes)

    def mislabelled(self) -> list[tuple[int, str, str]]:
        """(index, path, what is wrong) of readable files whose name promises another format."""
        out = []
        for i in np.flatnonzero(self.readable).tolist():
            promised = format_of_extension(os.path.splitext(self.paths[i])[1])
            if promised and promised != self.formats[i]:
                actual = ImageFormat(int(self.formats[i]))
                out.append((i, self.paths[i], f"named as {promised.name}, but holds {actual.name}"))
        return out


class KeptSizes(Protocol):
    """Sizes that an earlier scan read: a `MetadataCache`."""

    def refresh(
        self,
        paths: Iterable[str | os.PathLike[str]] | None = None,
        *,
        workers: int | None = None,
        engine: Engine = "auto",
        progress: Progress | None = None,
    ) -> KeptSizes:
        """The same of exactly `paths`, where only what changed is read."""
        ...

    def scan(self) -> SizeScan:
        """The rows as a scan."""
        ...


class ScanInterrupted(KeyboardInterrupt):
    """Ctrl-C during a scan.

    `scan` holds every row that was finished; its `read` says which. `cache` is a `MetadataCache` of these rows
    where the scan was for one, else None.
    """

    cache: Any = None  # a `MetadataCache`

    def __init__(self, scan: SizeScan) -> None:
        super().__init__(f"interrupted after {int(scan.read.sum())} of {len(scan)} files")
        self.scan = scan
