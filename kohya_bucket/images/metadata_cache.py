"""`MetadataCache`: what a dataset's headers say, kept between runs, so that a second run opens no image.

On disk it is an ordinary Parquet file with the columns path (text), width, height (int32), mtime_ns, bytes (int64),
format (text: PNG, JPEG, …), orientation (uint8), hash (text or null), reason (text, null if readable).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.checks import as_flag
from kohya_bucket.errors import KohyaBucketError, as_damage, reading
from kohya_bucket.files import replace_file
from kohya_bucket.images import arrow_files
from kohya_bucket.images.formats import ImageFormat
from kohya_bucket.images.listing import absolute_paths
from kohya_bucket.images.parallel import Engine, Progress
from kohya_bucket.images.scan import ABSENT, STAT, Job, ScanTask
from kohya_bucket.images.sizes import ScanInterrupted, SizeScan, read_sizes
from kohya_bucket.images.stamps import HASH_LENGTH, hash_file
from kohya_bucket.images.text_column import TextColumn

_NUMBERS = ("sizes", "mtime_ns", "bytes", "formats", "orientation")
_VERSION_KEY = b"kohya_bucket_metadata_version"
_VERSION = 1
_COLUMNS = ["path", "width", "height", "mtime_ns", "bytes", "format", "orientation", "hash", "reason"]
_FORMATS = frozenset(ImageFormat)
_HASH_TEXT = re.compile(rf"([0-9a-f]{{{HASH_LENGTH}}})?")


class Changes(NamedTuple):
    """What a refresh did, in files."""

    reused: int
    reread: int
    added: int
    dropped: int
    unreadable: int


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


def _hash(path: str) -> tuple[str]:
    return (hash_file(path),)


_HASH = ScanTask(_hash, [("hash", f"S{HASH_LENGTH}")])


@dataclass(frozen=True, repr=False)
class MetadataCache:
    """What headers say, as columns with one row per file; `MetadataCache()` is empty.

    Attributes:
        paths: N absolute paths.
        sizes: [N, 2] int32 pixels (width, height) as stored; (0, 0) where unreadable.
        mtime_ns: [N] int64, modification time when the header was read.
        bytes: [N] int64, length of the file.
        formats: [N] uint8 values of `ImageFormat`.
        orientation: [N] uint8 EXIF orientation, 1 to 8.
        hashes: [N] bytes of 32 hexadecimal digits, or None if nothing was hashed.
        reasons: why a file is unreadable, by row.
        changes: what `build` or `refresh` did; None for a loaded cache.
    """

    paths: TextColumn = field(default_factory=lambda: TextColumn.from_texts([]))
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
                f"paths is a {type(self.paths).__name__}, but a cache is made of columns; to make one of rows, call "
                "MetadataCache().with_rows(*rows)"
            )

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
            ScanInterrupted: Ctrl-C; its `cache` holds the finished rows.
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
        """A cache of exactly `paths` (default: the files of this one that still exist).

        A row is reused if the file's time and length are unchanged; everything else is read, including files that were
        unreadable. An unchanged file costs one `stat`.

        Raises:
            ScanInterrupted: Ctrl-C; its `cache` holds the finished rows.
        """
        hash = as_flag("hash", hash)
        how: dict[str, Any] = {"workers": workers, "engine": engine}
        # Times are taken before headers are read: a file that changes in between is read again next time.
        listed, times = self._times_of(paths, how)
        texts = TextColumn.from_texts(listed)
        old_rows = np.arange(len(listed)) if texts == self.paths else self.paths.find(texts)  # -1: a new path
        reused = self._unchanged(old_rows, times)
        interrupted: ScanInterrupted | None = None
        try:
            scan = read_sizes([listed[i] for i in np.flatnonzero(~reused).tolist()], **how, progress=progress)
        except ScanInterrupted as interrupt:
            scan, interrupted = interrupt.scan, interrupt
        cache = self._merged(texts, times, reused, old_rows[reused], scan)
        n_reused, added = int(reused.sum()), int((old_rows < 0).sum())
        dropped = len(self) - len(np.unique(old_rows[old_rows >= 0]))
        changes = Changes(n_reused, len(cache) - n_reused - added, added, dropped, len(cache.reasons))
        hashes = np.zeros(len(cache), f"S{HASH_LENGTH}") if hash and cache.hashes is None else cache.hashes
        cache = replace(cache, changes=changes, hashes=hashes)
        if interrupted is not None:
            reused[~reused] = scan.read
            interrupted.cache = cache.where(reused)
            raise interrupted
        return cache if hashes is None else cache._with_hashes(hashes, **how, progress=progress)

    def _times_of(self, paths: Iterable[str | os.PathLike[str]] | None, how: dict[str, Any]) -> tuple[list[str], Any]:
        """Absolute paths, and the time and length of each; None: of this cache's files, those that still exist."""
        listed = absolute_paths(self.paths if paths is None else paths)
        stat = Job(STAT, listed, **how)
        try:
            stat.run()
        except KeyboardInterrupt:
            raise ScanInterrupted(SizeScan.unread(listed)) from None
        if paths is not None:
            return listed, stat.rows
        kept = [i for i in range(len(listed)) if stat.failures.get(i) not in ABSENT]  # not: those that are away now
        return [listed[i] for i in kept], stat.rows[kept]

    def _merged(
        self, paths: TextColumn, times: Any, reused: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64], scan: SizeScan
    ) -> MetadataCache:
        """N paths: these `rows` of this cache where they are `reused`, [N] bool, and those of a scan elsewhere."""
        columns: dict[str, Any] = {"mtime_ns": times["mtime_ns"], "bytes": times["bytes"]}
        for name in ("sizes", "formats", "orientation"):
            new = getattr(scan, name)
            columns[name] = np.empty((len(paths), *new.shape[1:]), new.dtype)
            columns[name][reused], columns[name][~reused] = getattr(self, name)[rows], new
        if self.hashes is not None:  # those of the other files are computed last
            columns["hashes"] = np.zeros(len(paths), self.hashes.dtype)
            columns["hashes"][reused] = self.hashes[rows]
        stale = np.flatnonzero(~reused)
        return replace(self, paths=paths, reasons={int(stale[i]): why for i, _, why in scan.failures}, **columns)

    def _unchanged(self, rows: npt.NDArray[np.int64], times: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """[M] whether the rows here (-1: none) hold for the files of which `times` has the time and length."""
        cached = rows >= 0
        if not cached.any():
            return cached
        same = (self.mtime_ns[rows] == times["mtime_ns"]) & (self.bytes[rows] == times["bytes"])
        # Unreadable files are tried again: a missing plugin may be installed by now.
        return np.asarray(cached & same & (self.sizes[rows, 0] > 0))

    def _with_hashes(self, hashes: npt.NDArray[np.bytes_], **how: Any) -> MetadataCache:
        """This cache with these hashes, of which missing ones are computed."""
        missing = np.flatnonzero((hashes == b"") & (self.sizes[:, 0] > 0))
        job = Job(_HASH, [self.paths[i] for i in missing.tolist()], **how)
        try:
            job.run()
        except KeyboardInterrupt:
            interrupted = ScanInterrupted(self.scan())
            interrupted.cache = replace(self, hashes=hashes)
            raise interrupted from None
        finally:
            hashes[missing] = job.rows["hash"]
        return replace(self, hashes=hashes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MetadataCache:
        """Read a cache written by `save`, or by anyone else.

        Raises:
            KohyaBucketError: the file is missing, damaged, of a newer version, or holds impossible values; or pyarrow
                is missing.
            UnreadableError: it cannot be read now.
        """
        file = os.fspath(path)
        arrow_files.pyarrow_modules()
        is_there = False
        with suppress(FileNotFoundError), reading(file):
            is_there = Path(file).is_file()
        if not is_there:
            raise KohyaBucketError(
                f"{file}: no such metadata cache; make one with: kohya-bucket cache sizes … --output"
            )
        with as_damage(
            f"{file}: not a metadata cache, or damaged", "name another, or build it again", error=KohyaBucketError
        ):
            with reading(file):  # in full, and closed: on Windows a mapped file could not be replaced
                data = arrow_files.parquet_bytes(file)
            table = arrow_files.bounded_table(data, _COLUMNS)
            version = int((table.schema.metadata or {}).get(_VERSION_KEY, b"0"))
            if not version:
                raise ValueError("it has no version")
            if version > _VERSION:
                raise KohyaBucketError(
                    f"{file}: written by a newer version of this package (format {version}, this one reads "
                    f"{_VERSION}): update it, or build the cache again"
                )
            return cls(**_from_table(table))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache as Parquet, to a temporary file that replaces the old one: readers see the old or the new.

        A file that is listed twice is stored once; a name that is not valid Unicode is not stored.

        Raises:
            KohyaBucketError: pyarrow is missing, or the file cannot be replaced.
        """
        _, pq = arrow_files.pyarrow_modules()
        keep = self.paths.is_first() & self.paths.is_unicode()
        table = _as_table(self if keep.all() else self.where(keep))
        replace_file(os.fspath(path), lambda out: pq.write_table(table, out, compression="zstd"))

    def scan(self) -> SizeScan:
        """These rows as a result of `read_sizes`."""
        failures = [(i, self.paths[i], reason) for i, reason in sorted(self.reasons.items())]
        read = np.ones(len(self), dtype=bool)
        return SizeScan(self.paths, self.sizes, self.orientation, self.formats, failures, read)

    def __len__(self) -> int:
        return len(self.paths)

    def joined(self, other: MetadataCache) -> MetadataCache:
        """These rows followed by those of `other`; hashes only if both have them."""
        names = _NUMBERS if self.hashes is None or other.hashes is None else (*_NUMBERS, "hashes")
        columns: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in names}
        reasons = self.reasons | {len(self) + i: reason for i, reason in other.reasons.items()}
        paths = TextColumn.from_texts([*self.paths, *other.paths])
        return replace(self, paths=paths, reasons=reasons, **{"hashes": None} | columns)

    def where(self, keep: npt.NDArray[np.bool_]) -> MetadataCache:
        """The rows of a [N] bool mask."""
        return self.take(np.flatnonzero(keep))

    def take(self, rows: npt.NDArray[np.intp]) -> MetadataCache:
        """The rows at [M] positions, each at most once."""
        moved = {int(old): new for new, old in enumerate(rows)} if self.reasons else {}
        hashes = None if self.hashes is None else self.hashes[rows]
        reasons = {moved[i]: reason for i, reason in self.reasons.items() if i in moved}
        numbers: dict[str, Any] = {name: getattr(self, name)[rows] for name in _NUMBERS}
        return replace(self, paths=self.paths.take(rows), hashes=hashes, reasons=reasons, **numbers)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and self.get(path) is not None

    def get(self, path: str | os.PathLike[str]) -> MetadataRow | None:
        """Row of one file, or None if it is not in the cache."""
        i = int(self.paths.find(absolute_paths([path]))[0])
        return None if i < 0 else self._row_at(i)

    def __iter__(self) -> Iterator[MetadataRow]:
        """All rows in order, for example for a pandas table."""
        return (self._row_at(i) for i in range(len(self)))

    def with_rows(self, *rows: MetadataRow) -> MetadataCache:
        """A cache with these rows added, or replacing those of the same path: sizes known without opening files.

        Each call copies the whole cache, so pass many rows at once. A row is valid while the file has its `mtime_ns`
        and `bytes`. Hashes are kept if this cache has any.

        Raises:
            KohyaBucketError: not a `MetadataRow`, or one with an impossible size.
        """
        added = _columns(rows, self)
        known, n = self.paths.find(added.paths), len(self)
        # Of both together: an added row takes the place of an old one of its path; those with new paths follow.
        order = np.arange(n)
        order[known[known >= 0]] = n + np.flatnonzero(known >= 0)
        return self.joined(added).take(np.concatenate([order, n + np.flatnonzero(known < 0)]))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} n={len(self)} unreadable={len(self.reasons)} hashed={self.hashes is not None}>"

    def _row_at(self, i: int) -> MetadataRow:
        width, height = self.sizes[i].tolist()
        mtime_ns, nbytes, kind = int(self.mtime_ns[i]), int(self.bytes[i]), ImageFormat(int(self.formats[i]))
        digest = None if self.hashes is None else self.hashes[i].decode() or None
        orientation, reason = int(self.orientation[i]), self.reasons.get(i)
        return MetadataRow(self.paths[i], width, height, mtime_ns, nbytes, kind, orientation, digest, reason)

    def get_dim(self, path: str | os.PathLike[str]) -> tuple[int, int] | None:
        """(width, height) of one file, or None if it is not in the cache or unreadable."""
        row = self.get(path)
        return None if row is None or not row.width else (row.width, row.height)

    def is_stale(self, path: str | os.PathLike[str]) -> bool:
        """The file is not in the cache, gone, unreadable, or changed since its header was read."""
        row = self.get(path)
        try:
            status = os.stat(path)
        except OSError:
            return True
        return row is None or not row.width or (status.st_mtime_ns, status.st_size) != (row.mtime_ns, row.bytes)


def _columns(rows: Sequence[MetadataRow], like: MetadataCache) -> MetadataCache:
    """Rows as a cache like `like`; of several rows with one path the last."""
    for row in rows:
        if not isinstance(row, MetadataRow):
            raise KohyaBucketError(
                f"a row is {row!r}, but must be a MetadataRow: MetadataRow(path, width, height, mtime_ns, bytes)"
            )
    last = dict(zip(absolute_paths([row.path for row in rows]), rows, strict=True))
    sizes = as_sizes([(row.width, row.height) for row in last.values()])
    if sizes.min(initial=0) < 0:
        bad = list(last)[int(sizes.min(axis=1).argmin())]
        raise KohyaBucketError(f"the row of {bad} has a side below 0: 0 by 0 stands for unreadable")
    for path, row in last.items():  # no file could be read back that holds such a row
        if (not row.width) != (not row.height):
            why = f"is {row.width}x{row.height}: give both sides, or 0 by 0, which stands for unreadable"
        elif row.orientation not in range(1, 9):
            why = f"has the orientation {row.orientation!r}, but must have one from 1 to 8; 1 is upright"
        elif row.format not in _FORMATS:
            why = f"has the format {row.format!r}, but must have an ImageFormat"
        elif not _HASH_TEXT.fullmatch(row.hash or ""):
            why = f"has the hash {row.hash!r}, but must have {HASH_LENGTH} hexadecimal digits, as `hash_file` gives"
        else:
            continue
        raise KohyaBucketError(f"the row of {path} {why}")

    def column(name: str, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.array([getattr(row, name) for row in last.values()], dtype=kind)

    hashes = [(row.hash or "").encode("ascii", "replace") for row in last.values()]
    return replace(
        like,
        paths=TextColumn.from_texts(list(last)),
        sizes=sizes,
        mtime_ns=column("mtime_ns", np.int64),
        bytes=column("bytes", np.int64),
        formats=column("format", np.uint8),
        orientation=column("orientation", np.uint8),
        hashes=None if like.hashes is None else np.array(hashes, dtype=like.hashes.dtype),
        reasons={i: row.reason for i, row in enumerate(last.values()) if row.reason is not None},
    )


def is_metadata_cache(path: str) -> bool:
    """Whether a file was written by `MetadataCache.save`, by any version."""
    return arrow_files.is_marked(path, _VERSION_KEY)


def _as_table(cache: MetadataCache) -> Any:
    pa, _ = arrow_files.pyarrow_modules()
    n = len(cache)
    formats = arrow_files.arrow_texts(TextColumn.from_texts([kind.name for kind in ImageFormat]))
    hashes = None if cache.hashes is None else cache.hashes.astype(f"U{HASH_LENGTH}")
    reasons = [cache.reasons.get(i) for i in range(n)] if cache.reasons else None
    return pa.table(
        [
            arrow_files.arrow_texts(cache.paths),
            *map(arrow_files.arrow_of, (*cache.sizes.T, cache.mtime_ns, cache.bytes)),
            pa.DictionaryArray.from_arrays(arrow_files.arrow_of(cache.formats.view(np.int8)), formats),
            arrow_files.arrow_of(cache.orientation),
            pa.nulls(n, pa.string()) if hashes is None else pa.array(hashes, pa.string(), mask=hashes == ""),
            pa.nulls(n, pa.string()) if reasons is None else pa.array(reasons, pa.string()),
        ],
        names=_COLUMNS,
    ).replace_schema_metadata({_VERSION_KEY: str(_VERSION).encode()})


def _from_table(table: Any) -> dict[str, Any]:
    """The fields of a `MetadataCache`."""
    sizes = np.stack([arrow_files.checked_numbers(table[side], np.int32) for side in ("width", "height")], axis=1)
    orientation = arrow_files.checked_numbers(table["orientation"], np.uint8)
    for i in np.flatnonzero((sizes < 0).any(axis=1) | (sizes == 0)[:, 0] ^ (sizes == 0)[:, 1])[:1].tolist():
        raise ValueError(f"an image of {sizes[i, 0]}x{sizes[i, 1]} pixels in row {i}")
    for i in np.flatnonzero((orientation < 1) | (orientation > 8))[:1].tolist():
        raise ValueError(f"an orientation of {orientation[i]} in row {i}")
    return {
        "paths": arrow_files.checked_texts(table["path"]),
        "sizes": sizes,
        "mtime_ns": arrow_files.checked_numbers(table["mtime_ns"], np.int64),
        "bytes": arrow_files.checked_numbers(table["bytes"], np.int64),
        "formats": _formats(table["format"]),
        "orientation": orientation,
        "hashes": _hashes(table["hash"]),
        "reasons": arrow_files.some_texts(table["reason"]),
    }


def _formats(column: Any) -> npt.NDArray[np.uint8]:
    names = arrow_files.whole(column).cast("string").dictionary_encode().combine_chunks()
    members = ImageFormat.__members__
    codes = np.array([int(members.get(name, ImageFormat.OTHER)) for name in names.dictionary.to_pylist()], np.uint8)
    return codes[arrow_files.numpy_of(names.indices)] if len(names) else np.zeros(0, np.uint8)


def _hashes(column: Any) -> npt.NDArray[np.bytes_] | None:
    if column.null_count == len(column):
        return None
    texts = column.fill_null("").to_pylist()
    if not all(map(_HASH_TEXT.fullmatch, texts)):
        raise ValueError(f"a hash without {HASH_LENGTH} hexadecimal digits")
    return np.array(texts, dtype=f"S{HASH_LENGTH}")
