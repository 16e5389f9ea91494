"""Where each sample of tar shards lies, and how large its image is: one pass over the shards, then none.

A sample is what the `webdataset` package takes for one: consecutive members whose names are equal up to the
first dot of the last part. Only headers of images are read, wherever they lie in a shard. What leads to an image
less or to another one than meant is said in the log: samples without an image or with several, a caption ending
that occurs nowhere, a shard that seems to be cut off.
"""

from __future__ import annotations

import logging
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.datasets.tar_index_file import load, row_type, save
from kohya_bucket.datasets.tar_members import Oddities, plain_ending, split_key
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import TextColumn
from kohya_bucket.images.files.pieces import Region
from kohya_bucket.images.headers.header import header_of
from kohya_bucket.images.unreadable import UnreadableImageError
from kohya_bucket.texts import one_line

__all__ = ["TarIndex"]

_log = logging.getLogger(__name__)

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 512


@dataclass(frozen=True)
class TarIndex:
    """N samples with an image, in the order of the shards.

    Attributes:
        shards: paths of the tar files.
        stamps: (bytes, mtime_ns) of each shard when it was indexed.
        keys: N names: the member's name up to the first dot of its last part.
        rows: [N] structured: shard (number), offset, length (bytes of the image's member), width, height (pixels,
            stored; 0 where unreadable), orientation, caption_offset, caption_length (0 where there is none).
        reasons: why an image is unreadable, by row.
        caption: ending of the members that were taken for captions.
        image: ending of the members that were taken for images; None: whatever the first image of a sample is.
    """

    shards: list[str]
    stamps: list[tuple[int, int]]
    keys: TextColumn
    rows: npt.NDArray[Any]
    reasons: dict[int, str]
    caption: str | None = "txt"
    image: str | None = None

    @classmethod
    def build(
        cls,
        shards: Sequence[str],
        *,
        caption: str | None = "txt",
        image: str | None = None,
        before: TarIndex | None = None,
    ) -> TarIndex:
        """Index shards; those that are in `before` and have not changed are not opened.

        Args:
            caption: ending of the member that holds a sample's caption, such as "txt" or "json".
            image: ending of the member that is a sample's image, such as "jpg"; None: its first image.

        Raises:
            KohyaBucketError: no shards, or one that is missing, no tar, compressed, cut off, or that holds a name twice
                in one sample.
        """
        caption, image = plain_ending(caption), plain_ending(image)
        if not shards:
            raise KohyaBucketError("no shards: the list of tar files is empty")
        texts = [str(Path(shard).absolute()) for shard in shards]
        if before is not None and (before.caption, before.image) != (caption, image):
            before = None
        known = {} if before is None else {s: i for i, s in enumerate(before.shards)}
        stamps: list[tuple[int, int]] = []
        keys: list[str] = []
        parts: list[npt.NDArray[Any]] = []
        reasons: dict[int, str] = {}
        for number, shard in enumerate(texts):
            try:
                status = Path(shard).stat()
            except OSError as error:
                raise KohyaBucketError(f"{shard}: this shard cannot be read ({error.strerror})") from None
            stamps.append((status.st_size, status.st_mtime_ns))
            old = known.get(shard)
            if before is not None and old is not None and before.stamps[old] == stamps[-1]:
                at = np.flatnonzero(before.rows["shard"] == old)
                part, names = before.rows[at], [before.keys[i] for i in at.tolist()]
                why = {new: before.reasons[i] for new, i in enumerate(at.tolist()) if i in before.reasons}
            else:
                part, names, why = _index_shard(shard, caption, image)
            part["shard"] = number
            reasons.update({len(keys) + i: reason for i, reason in why.items()})
            keys += names
            parts.append(part)
        rows = np.concatenate(parts) if parts else np.zeros(0, dtype=row_type())
        return cls(texts, stamps, TextColumn.of(keys), rows, reasons, caption, image)

    def __len__(self) -> int:
        return len(self.rows)

    def is_current(self) -> bool:
        """Every shard is what it was when it was indexed."""
        try:
            found = [(status.st_size, status.st_mtime_ns) for status in (Path(shard).stat() for shard in self.shards)]
        except OSError:
            return False
        return found == self.stamps

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as Parquet, atomically."""
        save(os.fspath(path), self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TarIndex:
        """Read an index written by `save`.

        Raises:
            KohyaBucketError: missing, damaged, or not an index.
        """
        return cls(*load(os.fspath(path)))


def _index_shard(
    shard: str, caption: str | None, image: str | None
) -> tuple[npt.NDArray[Any], list[str], dict[int, str]]:
    rows: list[tuple[int, ...]] = []
    keys: list[str] = []
    reasons: dict[int, str] = {}
    odd = Oddities(image, caption)
    try:
        with open(shard, "rb", buffering=0) as file:
            _refuse_compressed(shard, file.read(8))
            for key, members in _samples(shard):
                ending = odd.image_of(key, members)
                if ending is None:
                    continue
                place, text = members[ending], members.get(caption or "", (0, 0))
                try:
                    width, height, orientation, _ = header_of(Region(file.fileno(), *place))
                except UnreadableImageError as error:
                    width, height, orientation = 0, 0, 1
                    reasons[len(rows)] = str(error)
                rows.append((0, *place, width, height, orientation, *text))
                keys.append(key)
    except (tarfile.TarError, OSError) as error:
        raise KohyaBucketError(f"{shard}: cannot be read as a tar file ({error}); copy or build it again") from None
    odd.warn(shard)
    return np.array(rows, dtype=row_type()), keys, reasons


def _refuse_compressed(shard: str, start: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise KohyaBucketError(
                f"{shard}: compressed with {name}, so that samples cannot be read at random: unpack it to a plain "
                ".tar, or read it in order with stream_from_shards"
            )


def _samples(shard: str) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, {ending: (offset, length)}) of each sample, its members in their order."""
    current: str = ""
    members: dict[str, tuple[int, int]] = {}
    with tarfile.open(shard, "r:") as tar:
        for member in tar:
            # Otherwise tarfile remembers every member of the shard.
            tar.members = []  # type: ignore[attr-defined]
            key, ending = split_key(member.name)
            if not member.isfile() or not key:
                continue
            if key != current:
                if members:
                    yield current, members
                current, members = key, {}
            if ending in members:
                raise KohyaBucketError(
                    f"{shard}: {member.name} is there twice in one sample, so it is not clear which one to use: build "
                    "the shard again without one of them"
                )
            members[ending] = (member.offset_data, member.size)
        if Path(shard).stat().st_size < tar.offset + _BLOCK:
            _log.warning("%s: ends without the mark of a tar's end: it may be cut off", one_line(shard))
    if members:
        yield current, members
