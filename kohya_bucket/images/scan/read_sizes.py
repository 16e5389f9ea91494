"""Sizes of many image files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kohya_bucket.images.files.paths import refuse_one_path
from kohya_bucket.images.headers.by_pillow import pixel_limit
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.pool import Engine, Job
from kohya_bucket.images.scan.size_scan import KeptSizes, ScanInterrupted, SizeScan
from kohya_bucket.images.tables.text_column import TextColumn

__all__ = ["read_sizes"]

_MAX_SIDE = 2**31 - 1


def read_sizes(
    paths: Iterable[str | os.PathLike[str]],
    *,
    workers: int | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
    verify: bool = False,
    cached: KeptSizes | None = None,
) -> SizeScan:
    """Read the stored size of each file: what `PIL.Image.open(path).size` says.

    Nothing is raised for a file: broken, empty, missing and forbidden ones are listed in `failures`. A file
    cut off after its header has a size; `verify` tells whether its pixels decode.

    Args:
        paths: N files.
        workers: at most this many threads or processes; None: as measured, 1: this thread alone.
        engine: "alone", "threads", "processes", "ray" (Ray Data), or "auto" to choose one of the first
            three by measuring.
        progress: called as `progress(done, total)` about ten times a second, from the main thread.
        verify: decode every image too; those that fail are listed in `failures` and get size (0, 0).
        cached: rows to reuse for files that have not changed since (their time and length are looked at).

    Raises:
        ScanInterrupted: Ctrl-C; its `scan` holds what was finished.
        KohyaBucketError: one path in place of a list, or workers below 1.
    """
    refuse_one_path(paths)
    texts: Sequence[str] = paths if isinstance(paths, TextColumn) else [os.fspath(path) for path in paths]
    if cached is not None and not verify:
        scan = cached.refresh(texts, workers=workers, engine=engine, progress=progress).scan()
        return replace(scan, paths=texts, failures=[(i, texts[i], reason) for i, _, reason in scan.failures])
    job = Job("size", texts, workers=workers, engine=engine, progress=progress)
    checked: Job | None = None
    try:
        job.run()
        if verify:
            checked = Job("verify", texts, workers=workers, engine=engine, progress=progress)
            checked.run()
    except KeyboardInterrupt:
        raise ScanInterrupted(_as_scan(job, checked)) from None
    return _as_scan(job, checked)


def _as_scan(job: Job, checked: Job | None) -> SizeScan:
    rows = job.rows
    sizes = np.stack([rows["width"], rows["height"]], axis=1)
    read = job.done if checked is None else job.done & checked.done
    reasons = dict(job.failures)
    for i in np.flatnonzero((sizes > _MAX_SIDE).any(axis=1)).tolist():
        reasons[i] = f"claims to have {sizes[i, 0]:,}x{sizes[i, 1]:,} pixels"
        sizes[i] = 0
    limit = pixel_limit()
    if limit is not None:
        for i in np.flatnonzero(sizes[:, 0] * sizes[:, 1] > limit).tolist():
            reasons[i] = f"more than {limit:,} pixels, which Pillow refuses (PIL.Image.MAX_IMAGE_PIXELS)"
    for i, reason in () if checked is None else checked.failures:
        reasons.setdefault(i, reason)
    failed = sorted(reasons)
    sizes[failed] = 0
    return SizeScan(
        paths=job.paths,
        sizes=sizes.astype(np.int32),
        orientation=np.maximum(rows["orientation"], 1).astype(np.uint8),
        formats=rows["format"].astype(np.uint8),
        failures=[(i, job.paths[i], reasons[i]) for i in failed],
        read=read,
        engine=tuple(dict.fromkeys(job.engines)),
    )
