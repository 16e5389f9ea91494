"""Which images each bucket holds, on disk: for datasets that are too large for a table in memory."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import PlanError
from kohya_bucket.files import replacing, write_file
from kohya_bucket.images.parallel import Progress
from kohya_bucket.inputs import open_input, read_input

_IMAGES, _STARTS = "images.bin", "starts.bin"
_SORTED_AT_ONCE: Final = 1 << 23
_MOST_STARTS: Final = 1 << 27  # bytes: 16 million buckets


def _kind(images: int) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if images <= 1 << 32 else np.uint64


@dataclass(frozen=True)
class BucketIndex:
    """The images of each bucket, mapped from disk.

    Attributes:
        images: [N] image numbers, bucket by bucket.
        starts: [K + 1] where each bucket begins in `images`.
    """

    images: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]

    @classmethod
    def write(
        cls, folder: str | PathLike[str], bucket_ids: npt.NDArray[np.integer[Any]], progress: Progress | None = None
    ) -> BucketIndex:
        """Sort images by bucket, in a folder that is not there yet, with 0.1 GB of memory.

        Args:
            bucket_ids: [N] bucket of each image, from 0; a memory map will do, such as `np.load(file, mmap_mode="r")`.
            progress: called with (done, to do) in images.

        Raises:
            PlanError: the folder is there, an image has no bucket, or there are none.
        """
        root = Path(folder)
        if root.exists():
            raise PlanError(f"{root} is there already: name another folder, or remove it")
        if not len(bucket_ids):
            raise PlanError("there are no images to index")
        pieces = range(0, len(bucket_ids), _SORTED_AT_ONCE)
        counts = np.zeros(0, dtype=np.int64)
        for begin in pieces:
            ids = np.asarray(bucket_ids[begin : begin + _SORTED_AT_ONCE])
            if int(ids.min()) < 0:
                raise PlanError(f"image {begin + int(np.argmin(ids))} has bucket {int(ids.min())}: leave it out")
            found = np.bincount(ids, minlength=len(counts))
            counts = found + np.pad(counts, (0, len(found) - len(counts)))
        starts = np.concatenate([[0], np.cumsum(counts)])
        root.mkdir(parents=True)
        kind = _kind(len(bucket_ids))
        at = starts[:-1].copy()
        with replacing(root / _IMAGES) as temporary:
            images = np.memmap(temporary, kind, "w+", shape=(len(bucket_ids),))
            for begin in pieces:
                ids = np.asarray(bucket_ids[begin : begin + _SORTED_AT_ONCE])
                order = np.argsort(ids, kind="stable")
                for part in np.split(order, np.flatnonzero(np.diff(ids[order])) + 1):
                    k = int(ids[part[0]])
                    images[at[k] : at[k] + len(part)] = part + begin
                    at[k] += len(part)
                if progress is not None:
                    progress(begin + len(ids), len(bucket_ids))
            images.flush()
            del images  # Windows renames no file that is mapped
        write_file(root / _STARTS, [starts.tobytes()])  # the last: without it nothing is there
        return cls.open(root)

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> BucketIndex:
        """What `write` wrote; nothing of it is read yet.

        Raises:
            PlanError: it is not there, was not written to its end, or cannot be read at the moment.
        """
        try:
            starts = np.frombuffer(read_input(Path(folder, _STARTS), _MOST_STARTS), dtype=np.int64)
            with open_input(Path(folder, _IMAGES)) as file:
                kind = _kind(int(starts[-1]))
                images = np.memmap(file, kind, "r", shape=(int(starts[-1]),))
                whole = file.seek(0, 2) == images.nbytes
        except (FileNotFoundError, ValueError, IndexError) as error:
            raise PlanError(f"{fspath(folder)} holds no complete index of buckets: {error}; write it again") from error
        except OSError as error:
            raise PlanError(f"{fspath(folder)} cannot be read at the moment: {error}; try again") from error
        if not whole or starts[0] or np.diff(starts).min(initial=0) < 0:
            raise PlanError(f"{fspath(folder)} holds no index of buckets: its files do not belong together")
        return cls(images, starts)

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[K] images of each bucket."""
        return np.diff(self.starts)
