"""Bring a `MetadataCache` up to date: reuse what has not changed, read the rest."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import as_flag
from kohya_bucket.images.cache.metadata_rows import Changes, MetadataRows
from kohya_bucket.images.files.content_hash import HASH_LENGTH
from kohya_bucket.images.files.paths import absolute_paths
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.pool import Engine, Job
from kohya_bucket.images.scan.read_sizes import read_sizes
from kohya_bucket.images.scan.size_scan import ScanInterrupted, SizeScan
from kohya_bucket.images.tables.text_column import TextColumn

__all__ = ["refreshed"]

_Kept = TypeVar("_Kept", bound=MetadataRows)
_Rows = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class _How(TypedDict):
    workers: int | None
    engine: Engine
    progress: Progress | None


def refreshed(
    before: _Kept,
    paths: Iterable[str | os.PathLike[str]],
    hash: bool,
    workers: int | None,
    engine: Engine,
    progress: Progress | None,
) -> _Kept:
    """A cache with row i for the i-th path. See `MetadataCache.refresh`."""
    hash = as_flag("hash", hash)
    how: _How = {"workers": workers, "engine": engine, "progress": progress}
    listed = absolute_paths(paths)
    texts = TextColumn.of(listed)
    n = len(texts)
    same = texts == before.paths
    rows = np.arange(n) if same else before.paths.find(texts)
    # Looked at before the headers are read: a file that changes in between is read again next time.
    stat = Job("stat", listed, workers=workers, engine=engine)
    try:
        stat.run()
    except KeyboardInterrupt:
        raise ScanInterrupted(_nothing(texts)) from None
    fresh = _unchanged(before, rows, stat)
    sizes, formats, orientation = np.zeros((n, 2), np.int32), np.zeros(n, np.uint8), np.ones(n, np.uint8)
    source = rows[fresh]
    sizes[fresh], formats[fresh], orientation[fresh] = (
        before.sizes[source], before.formats[source], before.orientation[source]
    )  # fmt: skip
    reused, added = int(fresh.sum()), int((rows < 0).sum())
    dropped = 0 if same else len(before) - len(np.unique(rows[rows >= 0]))
    stale = np.flatnonzero(~fresh)
    interrupted: ScanInterrupted | None = None
    try:
        scan = read_sizes([texts[i] for i in stale.tolist()], **how)
    except ScanInterrupted as interrupt:
        scan, interrupted = interrupt.scan, interrupt
    sizes[stale], formats[stale], orientation[stale] = scan.sizes, scan.formats, scan.orientation
    reasons = {int(stale[i]): reason for i, _, reason in scan.failures}
    changes = Changes(reused, n - reused - added, added, dropped, len(reasons))
    cache = replace(
        before, paths=texts, sizes=sizes, mtime_ns=stat.rows["mtime_ns"], bytes=stat.rows["bytes"], formats=formats,
        orientation=orientation, hashes=None, reasons=reasons, changes=changes,
    )  # fmt: skip
    if interrupted is not None:
        keep = fresh.copy()
        keep[stale[scan.read]] = True
        interrupted.cache = cache.where(keep)
        raise interrupted
    if hash or before.hashes is not None:
        return _with_hashes(cache, before, rows, fresh, how)
    return cache


def _unchanged(before: MetadataRows, rows: _Rows, stat: Job) -> _Mask:
    known = rows >= 0
    if not known.any():
        return known
    same = before.mtime_ns[rows] == stat.rows["mtime_ns"]
    same &= before.bytes[rows] == stat.rows["bytes"]
    # What was unreadable is tried again: the plugin it needs may be there by now.
    same &= before.sizes[rows, 0] > 0
    return np.asarray(same & known)


def _with_hashes(cache: _Kept, before: _Kept, rows: _Rows, fresh: _Mask, how: _How) -> _Kept:
    hashes = np.zeros(len(cache), dtype=f"S{HASH_LENGTH}")
    if before.hashes is not None:
        hashes[fresh] = before.hashes[rows[fresh]]
    missing = np.flatnonzero((hashes == b"") & (cache.sizes[:, 0] > 0))
    job = Job("hash", [cache.paths[i] for i in missing.tolist()], **how)
    try:
        job.run()
    except KeyboardInterrupt:
        interrupted = ScanInterrupted(cache.scan())
        hashes[missing] = job.rows["hash"]
        interrupted.cache = replace(cache, hashes=hashes)
        raise interrupted from None
    hashes[missing] = job.rows["hash"]
    return replace(cache, hashes=hashes)


def _nothing(texts: TextColumn) -> SizeScan:
    n = len(texts)
    return SizeScan(
        texts, np.zeros((n, 2), np.int32), np.ones(n, np.uint8), np.zeros(n, np.uint8), [], np.zeros(n, dtype=bool)
    )
