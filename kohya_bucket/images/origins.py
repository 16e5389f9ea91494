"""Where the bytes of N images are: files, addresses, or containers of many images.

Containers are tars, and tables with a column of images. An image in one is named `FILE#NAME`: `shard-0000.tar#img001`
is a sample of a tar, `part.parquet#17` a row of a table, counted from 0, and `part.parquet#before/17` is in another
column than `image`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, UnreadableError, reading
from kohya_bucket.images.image_rows import IMAGE_COLUMN, ScannedRows, read_row
from kohya_bucket.images.listing import absolute_paths, refuse_if_away
from kohya_bucket.images.parallel import REQUESTS, for_each
from kohya_bucket.images.pixels import NO_IMAGE, Pixels, explained, load_pixels
from kohya_bucket.images.remote import fetched, is_url
from kohya_bucket.images.scan import ABSENT, STAT, Job
from kohya_bucket.images.stamps import (
    Stamp,
    check_unchanged,
    hash_bytes,
    hash_file,
    read_unchanged,
    stamp_of,
    stamp_or_refuse,
)
from kohya_bucket.images.tar_index import TarIndex

_IN_TAR = re.compile(r"(.+?\.tar)#(.+)", re.DOTALL | re.IGNORECASE)
_IN_TABLE = re.compile(r"(.+?\.parquet)#(?:(.+)/)?(\d+)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Container:
    """A tar, or a column of a table.

    Attributes:
        path: path or address.
        stamp: when it was scanned; None: not scanned yet, any stamp will do.
        column: of the images; None: it is a tar.
    """

    path: str
    stamp: Stamp | None = None
    column: str | None = None

    def checked(self) -> Container:
        """The container with its current stamp. `KohyaBucketError` if it has changed or is gone."""
        current = stamp_or_refuse(self.path)
        if self.stamp is not None:
            check_unchanged(self.path, current, self.stamp)
        return replace(self, stamp=current)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """The bytes of an image, from `offset` in a tar; -1: looked up by name.

        Raises:
            OSError: the file cannot be read.
            KohyaBucketError: it has changed since it was scanned, is damaged, or has no such image.
        """
        stamp = self.stamp or stamp_of(self.path)
        key = name[len(self.path) + 1 :]
        if self.column is not None:
            return read_row(self.path, stamp, self.column, int(key.rpartition("/")[2]))
        if offset < 0:
            places = _places(self.path, stamp)
            if key not in places:
                raise KohyaBucketError(f"{self.path}: has no image of the name {key!r}")
            offset, length = places[key]
        return read_unchanged(self.path, stamp, offset, length)


def apart(name: str) -> tuple[str, str]:
    """A container's path and the rest of an image's name, from "#" on; for any other image its path and ""."""
    match = (_IN_TABLE.fullmatch(name) or _IN_TAR.fullmatch(name)) if "#" in name else None
    return (match[1], name[match.end(1) :]) if match else (name, "")


def container_of(name: str) -> Container | None:
    """The container of an image, by its name; None for a file of its own."""
    path, inside = apart(name)
    if not inside or (not is_url(name) and os.path.isfile(name)):
        return None
    if path.lower().endswith(".tar"):
        return Container(path)
    return Container(path, column=inside[1:].rpartition("/")[0] or IMAGE_COLUMN)


@functools.lru_cache(maxsize=4)
def _places(tar: str, stamp: Stamp) -> dict[str, tuple[int, int]]:
    """Offset and length of each image, by name."""
    index = TarIndex.build([tar], caption=None)
    check_unchanged(tar, stamp_of(tar), stamp)
    check_unchanged(tar, index.stamps[0], stamp)
    offsets, lengths = index.rows["offset"].tolist(), index.rows["length"].tolist()
    return dict(zip(index.keys, zip(offsets, lengths, strict=True), strict=True))


_WINDOW = 256 << 20
_NOWHERE: Stamp = (-1, -1)


@dataclass(frozen=True, eq=False)
class Origins:
    """The places of N images.

    Attributes:
        names: path or address of each; for one in a container see the docstring of this file.
        containers: the containers of some of them.
        container: [N] int32, number of each image's container; -1: a file of its own.
        offset, length: [N] int64, of its bytes in a tar; -1: unknown, for rows of tables only the offset.
    """

    names: list[str]
    containers: tuple[Container, ...]
    container: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    @classmethod
    def named(cls, names: Iterable[str | os.PathLike[str]]) -> Origins:
        """From names alone. Nothing is opened before an image is read."""
        texts = [os.fspath(name) for name in names]
        numbers: dict[Container | None, int] = {None: -1}
        container = [numbers.setdefault(container_of(text), len(numbers) - 1) if "#" in text else -1 for text in texts]
        unknown = np.full(len(texts), -1, np.int64)
        return cls(texts, tuple(filter(None, numbers)), np.array(container, np.int32), unknown, unknown)

    @classmethod
    def of_tars(cls, index: TarIndex) -> tuple[Origins, dict[int, str]]:
        """From the samples of tars; and why some are left out, because a later one in the shard has the same name.

        Raises:
            KohyaBucketError: a shard is missing, or has changed since it was indexed.
        """
        indexed = zip(absolute_paths(index.shards), index.stamps, strict=True)
        containers = for_each(Container.checked, [Container(path, stamp) for path, stamp in indexed])
        rows = index.rows
        container = rows["shard"].astype(np.int32)
        names = [f"{containers[k].path}#{key}" for k, key in zip(container.tolist(), index.keys, strict=True)]
        last = {name: i for i, name in enumerate(names)}
        again = "another image of its shard has the same name, and as in any tar the last one counts"
        reasons = {i: again for i, name in enumerate(names) if last[name] != i}
        offset, length = rows["offset"].astype(np.int64), rows["length"].astype(np.int64)
        return cls(names, tuple(containers), container, offset, length), reasons

    @classmethod
    def of_rows(cls, containers: Sequence[Container], tables: Sequence[ScannedRows]) -> Origins:
        """From the rows of tables, one container each."""
        counts = [len(table.lengths) for table in tables]
        starts = [f"{file.path}#{'' if file.column == IMAGE_COLUMN else f'{file.column}/'}" for file in containers]
        names = [f"{start}{row}" for start, count in zip(starts, counts, strict=True) for row in range(count)]
        container = np.repeat(np.arange(len(containers), dtype=np.int32), counts)
        offset, length = np.full(len(names), -1, np.int64), np.concatenate([table.lengths for table in tables])
        return cls(names, tuple(containers), container, offset, length)

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, items: Sequence[int] | npt.NDArray[np.int64]) -> Origins:
        """The images at these positions, with their containers."""
        at = np.asarray(items, dtype=np.int64)
        used = np.unique(self.container[at])
        used = used[used >= 0]
        container = np.where(self.container[at] < 0, -1, np.searchsorted(used, self.container[at])).astype(np.int32)
        names, containers = [self.names[i] for i in at.tolist()], tuple(self.containers[k] for k in used.tolist())
        return Origins(names, containers, container, self.offset[at], self.length[at])

    @property
    def inside(self) -> npt.NDArray[np.bool_]:
        """[N] which are in containers."""
        return self.container >= 0

    @property
    def files(self) -> list[str]:
        """Paths and addresses of their files and containers, each once."""
        single = [self.names[i] for i in np.flatnonzero(self.container < 0).tolist()]
        return list(dict.fromkeys([*single, *(container.path for container in self.containers)]))

    @property
    def are_remote(self) -> bool:
        """Some are read by requests, which can wait in parallel."""
        return any(map(is_url, self.files))

    def fetched(self, i: int) -> str | bytes:
        """What a decoder opens: the path of a local file, or the bytes of the image, see `Container.read`."""
        return fetched(self.names[i]) if self.container[i] < 0 else self._inside(i)

    def _inside(self, i: int) -> bytes:
        container = self.containers[int(self.container[i])]
        return container.read(self.names[i], int(self.offset[i]), int(self.length[i]))

    def pixels(self, i: int, alpha: bool = False) -> Pixels:
        """Image `i`, see `load_pixels`.

        Raises:
            UnreadableError: it is not at fault itself: see `refuse_if_away`.
            KohyaBucketError: it cannot be loaded.
        """
        try:
            return load_pixels(self.fetched(i), alpha=alpha)
        except KohyaBucketError:
            raise
        except NO_IMAGE as error:
            if isinstance(error, OSError) and not is_url(self.names[i]):
                refuse_if_away(apart(self.names[i])[0], error)
            raise explained(self.names[i], error) from error

    def stamps(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Bytes and modification time in ns, [N] each, of each image's file or container; -1 if missing.

        A container that was scanned keeps the stamp that it had then.

        Raises:
            UnreadableError: a file may exist, but cannot be looked at now.
        """
        single = np.flatnonzero(self.container < 0)
        job = Job(STAT, [self.names[i] for i in single.tolist()]).run()
        of_files = np.stack([job.rows["bytes"], job.rows["mtime_ns"]])
        for i, why in job.failures.items():
            if why not in ABSENT:
                raise UnreadableError(
                    f"{job.paths[i]}: cannot be read now ({why}), so whether it changed is unknown: run again"
                )
        of_files[:, list(job.failures)] = -1
        of_containers = np.array(for_each(_stamp, self.containers) or [_NOWHERE], np.int64)
        stamps = of_containers[self.container].T.copy()  # -1 takes the last one, and is overwritten next
        stamps[:, single] = of_files
        return stamps[0], stamps[1]

    def hash(self, i: int) -> str:
        """Hash of the image's bytes. `FileNotFoundError` or `KohyaBucketError` if they cannot be read."""
        with reading(self.names[i]):
            return hash_file(self.names[i]) if self.container[i] < 0 else hash_bytes(self._inside(i))

    def hashes(self) -> list[str]:
        """Hash of each image's bytes; "" where they cannot be read."""

        def hash_or_none(i: int) -> str:
            with suppress(OSError, ValueError):
                return self.hash(i)
            return ""

        return for_each(hash_or_none, range(len(self)), at_once=REQUESTS if self.are_remote else 1)

    def windows(self) -> npt.NDArray[np.int64]:
        """[N] number of the window of images that are best read together; 0 where the order does not matter.

        A row of a table is read with its neighbours, and a window of them stays in memory.
        """
        of_table = np.array([container.column is not None for container in self.containers] + [False])[self.container]
        end = np.cumsum(np.where(of_table, np.maximum(self.length, 0), 0))
        return np.asarray(np.where(of_table, 1 + end // _WINDOW, 0))


def _stamp(container: Container) -> Stamp:
    with suppress(FileNotFoundError), reading(container.path):
        return container.stamp or stamp_of(container.path)
    return _NOWHERE
