"""`MetadataCache`: what the headers of a data set say, kept between runs, so that a second run opens no image."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.errors import KohyaBucketError
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
    format: ImageFormat = ImageFormat.UNKNOWN
    orientation: int = 1
    hash: str | None = None
    reason: str | None = None


@dataclass(frozen=True, repr=False)
class MetadataCache(MetadataRows):
    """What headers say, one row per file, kept between runs; `MetadataCache()` has none. Columns: `MetadataRows`."""

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
        return cls().refresh(paths, hash=hash, workers=workers, engine=engine, progress=progress)

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
        return None if i < 0 else self._row_at(i)

    def __iter__(self) -> Iterator[MetadataRow]:
        """All rows in their order, as a table such as pandas' takes them."""
        return (self._row_at(i) for i in range(len(self)))

    def upsert(self, *rows: MetadataRow) -> None:
        """Add rows to this cache, or replace those of the same path: sizes that are known without opening the files.

        Every call takes as long as the cache is large, so give many rows at once. A row counts while the file has its
        `mtime_ns` and `bytes`. Hashes are kept where this cache has any.

        Raises:
            KohyaBucketError: what is given is no `MetadataRow`, or one with a size that no image has.
        """
        added = _columns(rows, self)
        at, new = self.paths.find(added.paths), len(self)
        order = np.arange(len(self))
        order[at[at >= 0]] = new + np.flatnonzero(at >= 0)
        joined = self.joined(added).take(np.concatenate([order, new + np.flatnonzero(at < 0)]))
        for column in fields(self):
            object.__setattr__(self, column.name, getattr(joined, column.name))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} n={len(self)} unreadable={len(self.reasons)} hashed={self.hashes is not None}>"

    def _row_at(self, i: int) -> MetadataRow:
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


def _columns(rows: Iterable[MetadataRow], like: MetadataCache) -> MetadataCache:
    """Rows as the columns of a cache like `like`; of several with one path the last."""
    given = list(rows)
    for row in given:
        if not isinstance(row, MetadataRow):
            raise KohyaBucketError(
                f"a row is {row!r}, but must be a MetadataRow: MetadataRow(path, width, height, mtime_ns, bytes)"
            )
    last = dict(zip(absolute_paths([row.path for row in given]), given, strict=True))
    sizes = as_sizes([(row.width, row.height) for row in last.values()])
    if sizes.min(initial=0) < 0:
        bad = list(last)[int(sizes.min(axis=1).argmin())]
        raise KohyaBucketError(f"the row of {bad} has a side below 0: 0 by 0 stands for unreadable")

    def column(name: str, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.array([getattr(row, name) for row in last.values()], dtype=kind)

    hashes = [(row.hash or "").encode("ascii", "replace") for row in last.values()]
    return replace(
        like, paths=TextColumn.of(list(last)), sizes=sizes, mtime_ns=column("mtime_ns", np.int64),
        bytes=column("bytes", np.int64), formats=column("format", np.uint8),
        orientation=column("orientation", np.uint8),
        hashes=None if like.hashes is None else np.array(hashes, dtype=like.hashes.dtype),
        reasons={i: row.reason for i, row in enumerate(last.values()) if row.reason is not None},
    )  # fmt: skip


def _is_unicode(text: builtins.bytes | memoryview) -> bool:
    try:
        str(text, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
