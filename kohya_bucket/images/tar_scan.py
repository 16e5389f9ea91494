"""What lies where in one tar shard, by one pass over it.

Also what the members of a sample are, image, caption, or something else, and what is odd about them.
"""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, UnreadableImageError
from kohya_bucket.images.headers import header_of
from kohya_bucket.images.parallel import check_cancelled
from kohya_bucket.images.pieces import Blocks, RawFile, Region, Source, read_at
from kohya_bucket.images.remote import RemoteFile, is_url
from kohya_bucket.texts import one_line

__all__ = ["ROW", "Oddities", "plain_ending", "scan_shard"]

_log = logging.getLogger(__name__)
_SHOWN = 3
_MOST_ENDINGS = 8


def split_key(name: str) -> tuple[str, str]:
    """("dir/a", "seg.png") of "dir/a.seg.png", as webdataset splits; ("", "") for names without a dot or stem."""
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return (folder + slash + stem, ending.lower()) if stem and dot else ("", "")


def grouped(shard: str, members: Iterable[tuple[str, Place]]) -> Iterator[tuple[str, dict[str, Place]]]:
    """(key, {ending: (offset, length)}) of each sample, from a tar's members in their order.

    Raises:
        KohyaBucketError: a name is there twice in one sample.
    """
    current: str = ""
    sample: dict[str, Place] = {}
    for name, place in members:
        key, ending = split_key(name)
        if not key:
            continue
        if key != current:
            if sample:
                yield current, sample
            current, sample = key, {}
        if ending in sample:
            raise KohyaBucketError(
                f"{shard}: {name} is there twice in one sample, so it is not clear which one to use: build the "
                "shard again without one of them"
            )
        sample[ending] = place
    if sample:
        yield current, sample


def plain_ending(ending: str | None) -> str | None:
    """An ending as members are compared by it: without the first dot, in small letters."""
    return None if ending is None else ending.removeprefix(".").lower() or None


@dataclass
class _Some:
    """How many there were, and the first of them."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, name: str, endings: Iterable[str]) -> None:
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"{name} ({', '.join(endings)})")

    def __str__(self) -> str:
        return ", ".join(self.first) + (" and others" if self.count > _SHOWN else "")


@dataclass
class Oddities:
    """Chooses the image of each sample, and counts what is odd: the log says it, since it can be read all the same.

    Attributes:
        image: ending of the image; None: the first member that is one.
        caption: ending of the caption; None: captions are not wanted.
    """

    image: str | None
    caption: str | None
    _without: _Some = field(default_factory=_Some)
    _several: _Some = field(default_factory=_Some)
    _endings: dict[str, None] = field(default_factory=dict)

    def image_of(self, key: str, endings: Collection[str]) -> str | None:
        """Which of the members of sample `key` is its image; None: there is none."""
        self._endings.update(dict.fromkeys(endings))
        if self.image is not None:
            found = [ending for ending in endings if ending == self.image]
        else:
            found = [ending for ending in endings if "." + ending.rpartition(".")[2] in IMAGE_EXTENSIONS]
        if not found:
            self._without.add(key, endings)
            return None
        if len(found) > 1:
            self._several.add(key, endings)
        return found[0]

    def warn(self, where: str) -> None:
        """Say what was odd about the samples of `where`."""
        if self._without.count:
            _log.warning(
                "%s: no image in %d of the samples, so these are left out: %s; the members of a sample must follow "
                "each other",
                one_line(where), self._without.count, one_line(self._without),
            )  # fmt: skip
        if self._several.count:
            _log.warning(
                "%s: several images in %d of the samples, so the first one is used: %s; in Python, image=... chooses "
                "another by its ending",
                one_line(where), self._several.count, one_line(self._several),
            )  # fmt: skip
        if self.caption is not None and self._endings and self.caption not in self._endings:
            _log.warning(
                "%s: no captions: no member ends in .%s, only in %s; choose another ending with "
                "--caption-extension or caption=...",
                one_line(where), self.caption,
                one_line(", ".join(f".{ending}" for ending in sorted(self._endings)[:_MOST_ENDINGS])),
            )  # fmt: skip


_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 512  # bytes of a member's header
ROW = np.dtype([
    ("shard", "i4"), ("offset", "i8"), ("length", "i8"), ("width", "i4"), ("height", "i4"), ("orientation", "i4"),
    ("caption_offset", "i8"), ("caption_length", "i8"),
])  # fmt: skip
"""A sample, as `TarIndex.rows` describes it."""

Place = tuple[int, int]
"""Offset and length of a member's bytes in its shard."""


def scan_shard(
    caption: str | None, image: str | None, shard: str
) -> tuple[npt.NDArray[Any], list[str], dict[int, str], Oddities]:
    """Of one shard the rows, keys and reasons as a `TarIndex` has them, and what is odd about it."""
    rows: list[tuple[int, ...]] = []
    keys: list[str] = []
    reasons: dict[int, str] = {}
    odd = Oddities(image, caption)
    with _opened(shard) as (source, file):
        for key, members in _samples(shard, source, file):
            ending = odd.image_of(key, members)
            if ending is None:
                continue
            try:
                size = header_of(Region(source, *members[ending]))[:3]
            except UnreadableImageError as error:
                size = 0, 0, 1
                reasons[len(rows)] = str(error)
            rows.append((0, *members[ending], *size, *members.get(caption or "", (0, 0))))
            keys.append(key)
    return np.array(rows, dtype=ROW), keys, reasons, odd


@contextmanager
def _opened(shard: str) -> Iterator[tuple[Source, Any]]:
    """A shard to be read in pieces, and as a file by `tarfile`."""
    try:
        with ExitStack() as stack:
            source: Source
            if is_url(shard):
                source = Blocks(RemoteFile(shard))
                file: Any = io.BufferedReader(RawFile(source))
            else:
                source = stack.enter_context(open(shard, "rb", buffering=0)).fileno()
                file = stack.enter_context(open(shard, "rb"))
            _refuse_compressed(shard, read_at(source, 0, 8))
            yield source, file
    except KohyaBucketError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:  # the last two: numbers that are none
        raise KohyaBucketError(f"{shard}: cannot be read as a tar file ({error}); copy or build it again") from None


def _refuse_compressed(shard: str, start: bytes) -> None:
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            raise KohyaBucketError(
                f"{shard}: compressed with {name}, so that samples cannot be read at random: unpack it to a plain "
                ".tar, or read it in order with stream_from_shards"
            )


def _samples(shard: str, source: Source, file: Any) -> Iterator[tuple[str, dict[str, Place]]]:
    """(key, {ending: (offset, length)}) of each sample, its members in their order."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        yield from grouped(shard, _places(shard, tar))
        after = read_at(source, tar.offset, _BLOCK)
        if any(after):  # where tarfile ends without a word, as at the end
            raise tarfile.ReadError(f"what follows from byte {tar.offset} on is no member")
        if len(after) < _BLOCK:
            _log.warning("%s: ends without the mark of a tar's end: it may be cut off", one_line(shard))


def _places(shard: str, tar: tarfile.TarFile) -> Iterator[tuple[str, Place]]:
    for member in tar:
        # Otherwise tarfile remembers every member of the shard.
        tar.members = []  # type: ignore[attr-defined]
        check_cancelled()
        if member.issparse():
            raise KohyaBucketError(
                f"{shard}: {one_line(member.name)} is stored without its holes (sparse), so its bytes do not lie in "
                "one piece: build the shard again without tar's --sparse"
            )
        if member.size < 0:
            raise KohyaBucketError(
                f"{shard}: {one_line(member.name)} states {member.size} bytes: build the shard again"
            )
        if member.isfile():
            yield member.name, (member.offset_data, member.size)
