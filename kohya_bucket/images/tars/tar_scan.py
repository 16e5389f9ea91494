"""What lies where in one tar shard: by one pass over it, or by its index, and then it is not opened."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.files.pieces import Blocks, RawFile, Region, Source, length_of, read_at
from kohya_bucket.images.files.remote import RemoteFile, is_url
from kohya_bucket.images.headers.header import header_of
from kohya_bucket.images.progress import go_on
from kohya_bucket.images.tars.shard_lists import Shard
from kohya_bucket.images.tars.tar_index_file import row_type
from kohya_bucket.images.tars.tar_members import Oddities, grouped
from kohya_bucket.images.unreadable import UnreadableImageError
from kohya_bucket.texts import one_line

__all__ = ["scan_shard"]

_log = logging.getLogger(__name__)

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 512
_Scanned = tuple[npt.NDArray[Any], list[str], dict[int, str], Oddities]


def scan_shard(caption: str | None, image: str | None, shard: Shard) -> _Scanned:
    """Of one shard the rows, keys and reasons as a `TarIndex` has them, and what is odd about it."""
    return _index_shard(shard.path, caption, image) if shard.members is None else _from_index(shard, caption, image)


def _from_index(shard: Shard, caption: str | None, image: str | None) -> _Scanned:
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
    return np.array(rows, dtype=row_type()), keys, reasons, odd


def _index_shard(shard: str, caption: str | None, image: str | None) -> _Scanned:
    rows: list[tuple[int, ...]] = []
    keys: list[str] = []
    reasons: dict[int, str] = {}
    odd = Oddities(image, caption)
    try:
        with _opened(shard) as (source, file):
            _refuse_compressed(shard, read_at(source, 0, 8))
            for key, members in _samples(shard, source, file):
                ending = odd.image_of(key, members)
                if ending is None:
                    continue
                place, text = members[ending], members.get(caption or "", (0, 0))
                try:
                    width, height, orientation, _ = header_of(Region(source, *place))
                except UnreadableImageError as error:
                    width, height, orientation = 0, 0, 1
                    reasons[len(rows)] = str(error)
                rows.append((0, *place, width, height, orientation, *text))
                keys.append(key)
    except (tarfile.TarError, OSError) as error:
        raise KohyaBucketError(f"{shard}: cannot be read as a tar file ({error}); copy or build it again") from None
    return np.array(rows, dtype=row_type()), keys, reasons, odd


@contextmanager
def _opened(shard: str) -> Iterator[tuple[Source, Any]]:
    """A shard to be read in pieces, and as a file for `tarfile`."""
    if is_url(shard):
        blocks = Blocks(RemoteFile(shard))
        yield blocks, io.BufferedReader(RawFile(blocks))
        return
    with open(shard, "rb", buffering=0) as raw, open(shard, "rb") as file:
        yield raw.fileno(), file


def _refuse_compressed(shard: str, start: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise KohyaBucketError(
                f"{shard}: compressed with {name}, so that samples cannot be read at random: unpack it to a plain "
                ".tar, or read it in order with stream_from_shards"
            )


def _samples(shard: str, source: Source, file: Any) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, {ending: (offset, length)}) of each sample, its members in their order."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        yield from grouped(shard, _places(tar))
        if length_of(source) < tar.offset + _BLOCK:
            _log.warning("%s: ends without the mark of a tar's end: it may be cut off", one_line(shard))


def _places(tar: tarfile.TarFile) -> Iterator[tuple[str, tuple[int, int]]]:
    for member in tar:
        # Otherwise tarfile remembers every member of the shard.
        tar.members = []  # type: ignore[attr-defined]
        go_on()
        if member.isfile():
            yield member.name, (member.offset_data, member.size)
