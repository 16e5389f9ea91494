"""Sizes of many image files, from their headers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.by_pillow import pixel_limit, too_many_pixels
from kohya_bucket.images.formats import ImageFormat, format_of_extension
from kohya_bucket.images.headers import read_header
from kohya_bucket.images.listing import refuse_one_path
from kohya_bucket.images.parallel import Engine, Progress
from kohya_bucket.images.remote import is_url
from kohya_bucket.images.scan import Job, ScanTask
from kohya_bucket.images.text_column import TextColumn


def _verify(path: str) -> tuple[bool]:
    from kohya_bucket.images.pixels import decode  # more of Pillow than a scan of headers needs

    if not is_url(path):
        read_header(path)  # refuses pipes, devices and gigabytes of nothing before all of it is read
    decode(path)
    return (True,)


_SIZE = ScanTask(read_header, [("width", "i8"), ("height", "i8"), ("orientation", "i8"), ("format", "i8")])
_VERIFY = ScanTask(_verify, [("ok", "?")])


_COLUMNS = ("sizes", "orientation", "formats", "read")


@dataclass(frozen=True)
class SizeScan:
    """What N headers say, as columns; row i belongs to the i-th path.

    Attributes:
        paths: the N paths, as text.
        sizes: [N, 2] int32 pixels (width, height) as stored, unrotated; (0, 0) where unreadable.
        orientation: [N] uint8 EXIF orientation 1 to 8; 1 is upright, 5 to 8 swap the sides when obeyed.
        formats: [N] uint8 values of `ImageFormat`, by content.
        failures: (index, path, reason) of each unreadable file, by index.
        read: [N] bool, False for files that an interrupted scan did not reach.
    """

    paths: Sequence[str]
    sizes: npt.NDArray[np.int32]
    orientation: npt.NDArray[np.uint8]
    formats: npt.NDArray[np.uint8]
    failures: list[tuple[int, str, str]]
    read: npt.NDArray[np.bool_]

    @classmethod
    def unread(cls, paths: Sequence[str]) -> SizeScan:
        """A scan that has read no file."""
        n = len(paths)
        ones, zeros = np.ones(n, np.uint8), np.zeros(n, np.uint8)
        return cls(paths, np.zeros((n, 2), np.int32), ones, zeros, [], np.zeros(n, dtype=bool))

    @classmethod
    def stated(cls, paths: Sequence[str], sizes: npt.NDArray[np.int32]) -> SizeScan:
        """A scan with sizes, [N, 2], that are known from elsewhere."""
        return replace(cls.unread(paths), sizes=sizes, read=np.ones(len(paths), dtype=bool))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def unreadable(self) -> dict[int, str]:
        """The reason of each unreadable file, by index."""
        return {i: reason for i, _, reason in self.failures}

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the file has a size."""
        return np.asarray(self.sizes[:, 0] > 0)

    def with_rows(self, rows: npt.NDArray[np.intp], other: SizeScan) -> SizeScan:
        """This scan with `rows` replaced by those of `other`."""
        columns = {name: getattr(self, name).copy() for name in _COLUMNS}
        for name, column in columns.items():
            column[rows] = getattr(other, name)
        failures = [(int(rows[i]), path, reason) for i, path, reason in other.failures]
        return replace(self, failures=failures, **columns)

    def select(self, rows: Sequence[int]) -> SizeScan:
        """Some of the files."""
        paths, reasons = [self.paths[i] for i in rows], self.unreadable
        failures = [(at, paths[at], reasons[i]) for at, i in enumerate(rows) if i in reasons]
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, paths=paths, failures=failures, **columns)

    def rotated(self) -> npt.NDArray[np.intp]:
        """Indices of images with an EXIF rotation or mirroring, which sd-scripts ignores."""
        return np.flatnonzero(self.orientation > 1)

    def upright_sizes(self) -> npt.NDArray[np.int32]:
        """[N, 2] sizes with EXIF applied: sides swapped where the orientation is 5 to 8."""
        return np.where((self.orientation >= 5)[:, None], self.sizes[:, ::-1], self.sizes)

    def mislabelled(self) -> list[tuple[int, str, str]]:
        """(index, path, problem) of readable files whose ending belongs to another format."""
        endings = (os.path.splitext(path)[1] for path in self.paths)
        promised = np.fromiter(map(format_of_extension, endings), np.uint8, count=len(self))
        wrong = np.flatnonzero(self.readable & (promised > 0) & (promised != self.formats)).tolist()
        says = "named as {0.name}, but holds {1.name}".format
        return [(i, self.paths[i], says(ImageFormat(promised[i]), ImageFormat(self.formats[i]))) for i in wrong]


class ScanInterrupted(KeyboardInterrupt):
    """Ctrl-C during a scan.

    `scan` holds the finished rows; its `read` says which. `cache` is a `MetadataCache` of these rows if the scan was
    for one, else None.
    """

    cache: Any = None  # a `MetadataCache`

    def __init__(self, scan: SizeScan) -> None:
        super().__init__(f"interrupted after {int(scan.read.sum())} of {len(scan)} files")
        self.scan = scan


def read_sizes(
    paths: Iterable[str | os.PathLike[str]],
    *,
    workers: int | None = None,
    engine: Engine = "auto",
    progress: Progress | None = None,
    verify: bool = False,
    cached: Any = None,
) -> SizeScan:
    """Read the stored size of each file: what `PIL.Image.open(path).size` says.

    No file raises an error: broken, empty, missing and forbidden files are listed in `failures`. A file that is
    truncated after its header has a size; `verify` tells whether its pixels decode.

    Args:
        paths: N files.
        workers: at most this many threads or processes; None: as measured, 1: this thread alone.
        engine: "alone", "threads", "processes", "ray", or "auto" to choose one of the first three by measuring.
        progress: called as `progress(done, total)` about ten times a second, from the main thread.
        verify: also decode every image; failures are listed in `failures` and get size (0, 0).
        cached: a `MetadataCache`, whose rows are reused for files with the same time and length.

    Raises:
        ScanInterrupted: Ctrl-C; its `scan` holds the finished rows.
        KohyaBucketError: a single path instead of a list, or workers below 1.

    Examples:
        >>> scan = read_sizes(["photos/0.png", "photos/none.png"])
        >>> scan.sizes.tolist()
        [[640, 480], [0, 0]]
        >>> scan.failures
        [(1, 'photos/none.png', 'no such file')]
    """
    refuse_one_path(paths)
    texts: Sequence[str] = paths if isinstance(paths, TextColumn) else [os.fspath(path) for path in paths]
    if cached is not None and not verify:
        scan: SizeScan = cached.refresh(texts, workers=workers, engine=engine, progress=progress).scan()
        return replace(scan, paths=texts, failures=[(i, texts[i], reason) for i, _, reason in scan.failures])
    job = Job(_SIZE, texts, workers=workers, engine=engine, progress=progress)
    checked: Job | None = None
    try:
        job.run()
        if verify:
            checked = Job(_VERIFY, texts, workers=workers, engine=engine, progress=progress)
            checked.run()
    except KeyboardInterrupt:
        raise ScanInterrupted(_as_scan(job, checked)) from None
    return _as_scan(job, checked)


def _as_scan(job: Job, checked: Job | None) -> SizeScan:
    rows = job.rows
    sizes = np.stack([rows["width"], rows["height"]], axis=1)
    read = job.done if checked is None else job.done & checked.done
    reasons = dict(job.failures)
    limit = pixel_limit()  # of this process; helper processes have the default
    if limit is not None:
        large = np.flatnonzero(sizes[:, 0] * sizes[:, 1] > limit).tolist()
        reasons |= dict.fromkeys(large, too_many_pixels(limit))
    if checked is not None:
        reasons = checked.failures | reasons
    failed = sorted(reasons)
    sizes[failed] = 0
    return SizeScan(
        paths=job.paths,
        sizes=sizes.astype(np.int32),
        orientation=np.maximum(rows["orientation"], 1).astype(np.uint8),
        formats=rows["format"].astype(np.uint8),
        failures=[(i, job.paths[i], reasons[i]) for i in failed],
        read=read,
    )
