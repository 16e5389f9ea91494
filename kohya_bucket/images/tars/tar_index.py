"""Where each sample of tar shards lies, and how large its image is: one pass over the shards, then none.

A sample is what the `webdataset` package takes for one: consecutive members whose names are equal up to the
first dot of the last part. Only headers of images are read, wherever they lie in a shard; and nothing where an index of
webshart says how large they are (`shard_lists.py`). What leads to an image
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

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import TextColumn
from kohya_bucket.images.files.pieces import Region
from kohya_bucket.images.files.remote import is_url
from kohya_bucket.images.headers.header import header_of
from kohya_bucket.images.tars.shard_lists import Shard, listed_shards
from kohya_bucket.images.tars.tar_index_file import load, row_type, save
from kohya_bucket.images.tars.tar_members import Oddities, grouped, plain_ending
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
            stored; 0 where unreadable), orientation (0: not known), caption_offset, caption_length (0: none).
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
            shards: tars; a `wids` index of tars; JSON files of webshart, one beside each tar. With image geometry in
                those, no tar is opened, nor need it be there until an image is read.
            caption: ending of the member that holds a sample's caption, such as "txt" or "json".
            image: ending of the member that is a sample's image, such as "jpg"; None: its first image.

        Raises:
            KohyaBucketError: no shards, or one that is missing, no tar, compressed, cut off, or that holds a name twice
                in one sample.
        """
        caption, image = plain_ending(caption), plain_ending(image)
        if not shards:
            raise KohyaBucketError("no shards: the list of tar files is empty")
        listed = listed_shards(shards)
        texts = [shard.path for shard in listed]
        if before is not None and (before.caption, before.image) != (caption, image):
            before = None
        known = {} if before is None else {s: i for i, s in enumerate(before.shards)}
        stamps: list[tuple[int, int]] = []
        keys: list[str] = []
        parts: list[npt.NDArray[Any]] = []
        reasons: dict[int, str] = {}
        for number, (shard, stated) in enumerate(zip(texts, listed, strict=True)):
            stamps.append(_stamp(stated))
            old = known.get(shard)
            if before is not None and old is not None and before.stamps[old] == stamps[-1]:
                at = np.flatnonzero(before.rows["shard"] == old)
                part, names = before.rows[at], [before.keys[i] for i in at.tolist()]
                why = {new: before.reasons[i] for new, i in enumerate(at.tolist()) if i in before.reasons}
            else:
                if stated.members is None:
                    part, names, why = _index_shard(shard, caption, image)
                else:
                    part, names, why = _from_index(stated, caption, image)
            part["shard"] = number
            reasons.update({len(keys) + i: reason for i, reason in why.items()})
            keys += names
            parts.append(part)
        rows = np.concatenate(parts) if parts else np.zeros(0, dtype=row_type())
        return cls(texts, stamps, TextColumn.of(keys), rows, reasons, caption, image)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """[N, 2] int32 (width, height) as stored; (0, 0) where unreadable."""
        return np.stack([self.rows["width"], self.rows["height"]], axis=1)

    def name(self, index: int) -> str:
        """The shard, and the sample in it."""
        return f"{self.shards[int(self.rows[index]['shard'])]}#{self.keys[index]}"

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


def _stamp(shard: Shard) -> tuple[int, int]:
    """(bytes, mtime_ns) of a tar; (bytes, 0) of one that is not here, but known by its index."""
    try:
        if is_url(shard.path):
            raise FileNotFoundError(2, "only files on this machine are opened")
        status = Path(shard.path).stat()
    except OSError as error:
        if shard.members is None:
            raise KohyaBucketError(f"{shard.path}: this shard cannot be read ({error.strerror})") from None
        return shard.nbytes or max((m.offset + m.length for m in shard.members), default=0), 0
    if shard.nbytes not in (None, status.st_size):
        raise KohyaBucketError(
            f"{shard.path}: has {status.st_size} bytes, but {shard.nbytes} by its index: one of the two is another "
            "version; fetch both again"
        )
    return status.st_size, status.st_mtime_ns


def _from_index(
    shard: Shard, caption: str | None, image: str | None
) -> tuple[npt.NDArray[Any], list[str], dict[int, str]]:
    """The rows of a shard whose index says all: the tar is not opened."""
    rows: list[tuple[int, ...]] = []
    keys: list[str] = []
    reasons: dict[int, str] = {}
    odd = Oddities(image, caption)
    members = shard.members or ()
    size_of = {(m.offset, m.length): m.size for m in members}
    for key, places in grouped(shard.path, ((m.name, (m.offset, m.length)) for m in members)):
        ending = odd.image_of(key, places)
        if ending is None:
            continue
        size = size_of[places[ending]]
        if size is None:
            reasons[len(rows)] = f"{shard.index} states no size of it"
        rows.append((0, *places[ending], *(size or (0, 0)), 0, *places.get(caption or "", (0, 0))))
        keys.append(key)
    if rows and len(reasons) == len(rows):
        raise KohyaBucketError(
            f"{shard.index}: states no sizes of images: make it with `webshart extract-metadata "
            "--include-image-geometry`, or name the tar files, whose headers are read then"
        )
    odd.warn(shard.path)
    return np.array(rows, dtype=row_type()), keys, reasons


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
    with tarfile.open(shard, "r:") as tar:
        yield from grouped(shard, _places(tar))
        if Path(shard).stat().st_size < tar.offset + _BLOCK:
            _log.warning("%s: ends without the mark of a tar's end: it may be cut off", one_line(shard))


def _places(tar: tarfile.TarFile) -> Iterator[tuple[str, tuple[int, int]]]:
    for member in tar:
        # Otherwise tarfile remembers every member of the shard.
        tar.members = []  # type: ignore[attr-defined]
        if member.isfile():
            yield member.name, (member.offset_data, member.size)
