"""`MetadataCache`: what the headers of a data set say, kept between runs, so that a second run opens no image."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kohya_bucket.images.cache import parquet_file as parquet
from kohya_bucket.images.cache.metadata_rows import Changes, MetadataRows
from kohya_bucket.images.cache.refresh import refreshed
from kohya_bucket.images.files.paths import absolute_paths, refuse_one_path
from kohya_bucket.images.formats import ImageFormat
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.pool import Engine
from kohya_bucket.images.tables.text_column import TextColumn

__all__ = ["Changes", "MetadataCache", "MetadataRow"]


class MetadataRow(NamedTuple):
    """One file of a `MetadataCache`; sizes in pixels, as stored (unrotated)."""

    path: str
    width: int
    height: int
    mtime_ns: int
    bytes: int
    format: ImageFormat
    orientation: int
    hash: str | None
    reason: str | None


@dataclass(frozen=True)
class MetadataCache(MetadataRows):
    """What headers say, one row per file, kept between runs; the columns are those of `MetadataRows`."""

    @classmethod
    def build(
        cls,
        paths: Iterable[str | os.PathLike[str]],
        *,
        hash: bool = False,
        workers: int | None = None,
        engine: Engine = "auto",
        progress: Progress | None = None,
    ) -> MetadataCache:
        """Read every file's header. Row i belongs to the i-th path.

        Raises:
            ScanInterrupted: Ctrl-C; its `cache` holds the rows that were finished.
        """
        return _EMPTY.refresh(paths, hash=hash, workers=workers, engine=engine, progress=progress)

    def refresh(
        self,
        paths: Iterable[str | os.PathLike[str]] | None = None,
        *,
        hash: bool = False,
        workers: int | None = None,
        engine: Engine = "auto",
        progress: Progress | None = None,
    ) -> MetadataCache:
        """A cache of exactly `paths` (default: the files of this one, without those that are gone).

        A row is reused if the file's time and length are what they were; everything else is read, also files
        that were unreadable before. One `stat` per file is all that unchanged files cost.

        Raises:
            ScanInterrupted: Ctrl-C; its `cache` holds the rows that were finished.
        """
        refuse_one_path(paths)
        if paths is None:
            paths = [path for path in self.paths if os.path.exists(path)]
        return refreshed(self, paths, hash, workers, engine, progress)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MetadataCache:
        """Read a cache written by `save`.

        Raises:
            KohyaBucketError: no such file, a damaged one, one of a newer version, or pyarrow is missing.
        """
        columns, texts = parquet.load(os.fspath(path))
        reasons = columns.pop("reasons")
        return cls(texts, reasons=reasons, **columns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache as Parquet: to a sibling file first, then renamed, so that readers see old or new.

        A file that was listed twice is stored once; a name that is no valid Unicode is not stored.

        Raises:
            KohyaBucketError: pyarrow is missing, or the file cannot be replaced.
        """
        keep = self.paths.is_first()
        if not _is_unicode(self.paths.pool):
            keep &= np.array([_is_unicode(os.fsencode(path)) for path in self.paths], dtype=bool)
        parquet.save(os.fspath(path), self if keep.all() else self.where(keep))

    def __contains__(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and self._row(path) >= 0

    def get(self, path: str | os.PathLike[str]) -> MetadataRow | None:
        """Row of one file, or None if it is not in the cache."""
        i = self._row(path)
        if i < 0:
            return None
        width, height = self.sizes[i].tolist()
        return MetadataRow(
            self.paths[i], width, height, int(self.mtime_ns[i]), int(self.bytes[i]), ImageFormat(int(self.formats[i])),
            int(self.orientation[i]), self.hashes[i].decode() or None if self.hashes is not None else None,
            self.reasons.get(i),
        )  # fmt: skip

    def get_dim(self, path: str | os.PathLike[str]) -> tuple[int, int] | None:
        """(width, height) of one file, or None if it is not in the cache or unreadable."""
        row = self.get(path)
        return None if row is None or not row.width else (row.width, row.height)

    def is_stale(self, path: str | os.PathLike[str]) -> bool:
        """The file is unknown, gone, unreadable, or has changed since its header was read."""
        row = self.get(path)
        if row is None or not row.width:
            return True
        try:
            status = os.stat(path)
        except OSError:
            return True
        return (status.st_mtime_ns, status.st_size) != (row.mtime_ns, row.bytes)

    def _row(self, path: str | os.PathLike[str]) -> int:
        return int(self.paths.find(absolute_paths([path]))[0])


def _is_unicode(text: builtins.bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


_EMPTY = MetadataCache(
    TextColumn.of([]), np.zeros((0, 2), np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8),
    np.ones(0, np.uint8),
)  # fmt: skip
