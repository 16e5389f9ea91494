"""The columns of a `MetadataCache`, without what reads and writes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.scan.size_scan import SizeScan
from kohya_bucket.images.tables.text_column import TextColumn

__all__ = ["Changes", "MetadataRows"]

_Rows = TypeVar("_Rows", bound="MetadataRows")


class Changes(NamedTuple):
    """What a refresh did, in files."""

    reused: int
    reread: int
    added: int
    dropped: int
    unreadable: int


@dataclass(frozen=True)
class MetadataRows:
    """Columns, one row per file.

    Attributes:
        paths: N absolute paths.
        sizes: [N, 2] int32 pixels (width, height) as stored; (0, 0) where unreadable.
        mtime_ns: [N] int64, time of the last change when the header was read.
        bytes: [N] int64, length of the file.
        formats: [N] uint8 values of `ImageFormat`.
        orientation: [N] uint8 EXIF orientation, 1 to 8.
        hashes: [N] bytes of 32 hexadecimal digits, or None if no content was hashed.
        reasons: why a file is unreadable, by row.
        changes: what `build` or `refresh` did; None for a cache that was loaded.
    """

    paths: TextColumn = field(default_factory=lambda: TextColumn.of([]))
    sizes: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    mtime_ns: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    bytes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    formats: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    orientation: npt.NDArray[np.uint8] = field(default_factory=lambda: np.ones(0, np.uint8))
    hashes: npt.NDArray[np.bytes_] | None = None
    reasons: dict[int, str] = field(default_factory=dict)
    changes: Changes | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.paths, TextColumn):
            raise KohyaBucketError(
                f"paths is a {type(self.paths).__name__}, but a cache is made of columns; of rows it is made by "
                "cache = MetadataCache() and cache.upsert(*rows)"
            )

    def scan(self) -> SizeScan:
        """The same rows as `read_sizes` gives them."""
        failures = [(i, self.paths[i], reason) for i, reason in sorted(self.reasons.items())]
        return SizeScan(
            self.paths, self.sizes, self.orientation, self.formats, failures, np.ones(len(self), dtype=bool), ("cache",)
        )

    def __len__(self) -> int:
        return len(self.paths)

    def joined(self: _Rows, other: _Rows) -> _Rows:
        """These rows and then those of `other`; hashes only where both have them."""
        hashes = None
        if self.hashes is not None and other.hashes is not None:
            hashes = np.concatenate([self.hashes, other.hashes])
        return replace(
            self, paths=TextColumn.of([*self.paths, *other.paths]), sizes=np.concatenate([self.sizes, other.sizes]),
            mtime_ns=np.concatenate([self.mtime_ns, other.mtime_ns]), bytes=np.concatenate([self.bytes, other.bytes]),
            formats=np.concatenate([self.formats, other.formats]),
            orientation=np.concatenate([self.orientation, other.orientation]), hashes=hashes,
            reasons=self.reasons | {len(self) + i: reason for i, reason in other.reasons.items()},
        )  # fmt: skip

    def where(self: _Rows, keep: npt.NDArray[np.bool_]) -> _Rows:
        """The rows of a [N] bool mask."""
        return self.take(np.flatnonzero(keep))

    def take(self: _Rows, rows: npt.NDArray[np.intp]) -> _Rows:
        """The rows at [M] positions, each at most once."""
        moved = {int(old): new for new, old in enumerate(rows)}
        return replace(
            self, paths=self.paths.take(rows), sizes=self.sizes[rows], mtime_ns=self.mtime_ns[rows],
            bytes=self.bytes[rows], formats=self.formats[rows], orientation=self.orientation[rows],
            hashes=None if self.hashes is None else self.hashes[rows],
            reasons={moved[i]: reason for i, reason in self.reasons.items() if i in moved},
        )  # fmt: skip
