"""Where each sample of tar shards lies, and how large its image is, from one pass over the shards.

A sample is defined as in the package `webdataset`: consecutive members whose names are equal up to the first dot of
their last part. Only headers of images are read. The log names whatever loses an image or picks an unintended one:
samples with no image or several, a caption ending that never occurs, a shard that seems truncated.
"""

from __future__ import annotations

import io
import logging
import os
import tarfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage, reading
from kohya_bucket.files import replace_file
from kohya_bucket.images import arrow_files
from kohya_bucket.images.formats import IMAGE_EXTENSIONS, UnreadableImageError
from kohya_bucket.images.headers import header_of
from kohya_bucket.images.listing import absolute_paths
from kohya_bucket.images.parallel import Engine, Progress, check_cancelled, for_each
from kohya_bucket.images.remote import Region, is_url, open_remote, read_at
from kohya_bucket.images.stamps import stamp_of, stamp_or_refuse
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.inputs import open_input
from kohya_bucket.texts import one_line

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)
_SHOWN = 3
_MOST_ENDINGS = 8
_VERSION_KEY = b"kohya_bucket_tar_index_version"
_VERSION = b"1"


@dataclass(frozen=True)
class TarIndex:
    """N samples with an image, in the order of the shards.

    Attributes:
        shards: paths of the tar files.
        stamps: (bytes, mtime_ns) of each shard when it was indexed.
        keys: N names: the member's name up to the first dot of its last part.
        rows: [N] structured: shard (number), offset, length (bytes of the image's member), width, height (pixels,
            stored; 0 where unreadable), orientation, caption_offset, caption_length (0: none).
        reasons: why an image is unreadable, by row.
        caption: ending of the members that are captions.
        image: ending of the members that are images; None: the first image of each sample.
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
        engine: Engine = "auto",
        progress: Progress | None = None,
    ) -> TarIndex:
        """Index shards; unchanged ones that are in `before` are not opened.

        Args:
            shards: paths or addresses of tars.
            caption: ending of the member that holds a sample's caption, such as "txt" or "json".
            image: ending of the member that is a sample's image, such as "jpg"; None: its first image.
            engine: "ray" to index them on a cluster.
            progress: called as `progress(done, total)`, in shards.

        Raises:
            KohyaBucketError: no shards, or one that is missing, not a tar, compressed, truncated, or has a name
                twice in one sample.
        """
        caption, image = plain_ending(caption), plain_ending(image)
        if not shards:
            raise KohyaBucketError("no shards: the list of tar files is empty")
        texts = absolute_paths(shards)
        if before is None or (before.caption, before.image) != (caption, image):
            before = cls([], [], TextColumn.from_texts([]), np.zeros(0, dtype=ROW), {})
        # Stamps are taken before shards are read: one that changes in between is indexed again next time.
        stamps = for_each(stamp_or_refuse, texts)
        indexed = {shard: i for i, shard in enumerate(zip(before.shards, before.stamps, strict=True))}
        new = [shard for shard in zip(texts, stamps, strict=True) if shard not in indexed]
        order = np.argsort(before.rows["shard"], kind="stable")
        begins = np.searchsorted(before.rows["shard"][order], np.arange(len(before.shards) + 1))
        scans = iter(for_each(partial(scan_shard, caption, image), [path for path, _ in new], engine, progress))
        keys: list[str] = []
        parts: list[npt.NDArray[Any]] = []
        reasons: dict[int, str] = {}
        # Shards follow each other as given, whether new or from `before`; `why` numbers the rows of one shard.
        for number, shard in enumerate(zip(texts, stamps, strict=True)):
            if shard not in indexed:
                part, names, why, odd = next(scans)
                odd.warn(shard[0])
            else:
                known = indexed[shard]
                at = order[begins[known] : begins[known + 1]]
                part, names = before.rows[at], [before.keys[i] for i in at.tolist()]
                why = {row: before.reasons[i] for row, i in enumerate(at.tolist()) if i in before.reasons}
            part["shard"] = number
            reasons |= {len(keys) + i: reason for i, reason in why.items()}
            keys += names
            parts.append(part)
        return cls(texts, stamps, TextColumn.from_texts(keys), np.concatenate(parts), reasons, caption, image)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """[N, 2] int32 (width, height) as stored; (0, 0) where unreadable."""
        return np.stack([self.rows["width"], self.rows["height"]], axis=1)

    def name(self, index: int) -> str:
        """Path of the shard, and key of the sample."""
        return f"{self.shards[int(self.rows[index]['shard'])]}#{self.keys[index]}"

    def is_current(self) -> bool:
        """No shard has changed since it was indexed. `UnreadableError` if that cannot be told now."""
        for shard, stamp in zip(self.shards, self.stamps, strict=True):
            try:
                with reading(shard):
                    if stamp_of(shard) != stamp:
                        return False
            except OSError:  # gone, or no longer a file
                return False
        return True

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as Parquet, atomically. Raises `KohyaBucketError` for a member whose name is not Unicode."""
        pa, pq = arrow_files.pyarrow_modules()
        for odd in np.flatnonzero(~self.keys.is_unicode())[:1].tolist():
            raise KohyaBucketError(
                f"{os.fspath(path)} cannot hold {self.name(odd)!a}, whose name is not UTF-8: rename the member, or "
                "read the shards without an index"
            )
        names = list(ROW.names or ())
        reasons = [self.reasons.get(i) for i in range(len(self))]
        caption, image = ((ending or "").encode() for ending in (self.caption, self.image))
        meta = {_VERSION_KEY: _VERSION, b"caption": caption, b"image": image}
        for i, (shard, (size, mtime)) in enumerate(zip(self.shards, self.stamps, strict=True)):
            meta[f"shard{i}".encode()] = f"{size} {mtime} {shard}".encode()
        numbers = [arrow_files.arrow_of(self.rows[name]) for name in names]
        columns = [arrow_files.arrow_texts(self.keys), *numbers, pa.array(reasons, pa.string())]
        table = pa.table(columns, names=["key", *names, "reason"]).replace_schema_metadata(meta)
        replace_file(os.fspath(path), lambda out: pq.write_table(table, out, compression="zstd"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TarIndex:
        """Read an index written by `save`.

        Raises:
            KohyaBucketError: the file is missing, damaged, or not an index.
        """
        names = list(ROW.names or ())
        with as_damage(f"{path}: cannot be read as an index of shards", "build it again", error=KohyaBucketError):
            try:
                table = arrow_files.bounded_table(arrow_files.parquet_bytes(path), ["key", *names, "reason"])
            except FileNotFoundError as error:
                raise KohyaBucketError(f"{path}: cannot be read as an index of shards ({error}): build it") from None
            meta = table.schema.metadata or {}
            if meta.get(_VERSION_KEY) != _VERSION:
                raise KohyaBucketError(f"{path}: not an index of shards of this version; build it again")
            rows = np.zeros(len(table), dtype=ROW)
            for name in names:
                rows[name] = arrow_files.checked_numbers(table[name], ROW[name])
            shards: list[str] = []
            stamps: list[tuple[int, int]] = []
            while (line := meta.get(f"shard{len(shards)}".encode())) is not None:
                size, mtime, shard = line.decode().split(" ", 2)
                shards.append(shard)
                stamps.append((int(size), int(mtime)))
            _refuse_impossible(rows, np.array([size for size, _ in stamps], np.int64))
            caption, image = (meta.get(key, b"").decode() or None for key in (b"caption", b"image"))
            keys, reasons = arrow_files.checked_texts(table["key"]), arrow_files.some_texts(table["reason"])
            return cls(shards, stamps, keys, rows, reasons, caption, image)


def is_tar_index(path: str) -> bool:
    """Whether a file was written by `TarIndex.save`."""
    return arrow_files.is_marked(path, _VERSION_KEY)


def _refuse_impossible(rows: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
    if not len(rows):
        return
    if rows["shard"].min() < 0 or rows["shard"].max() >= len(lengths):
        raise ValueError(f"a sample in shard {rows['shard'].min()} or {rows['shard'].max()} of {len(lengths)}")
    ends = lengths[rows["shard"]]
    for name in ("", "caption_"):
        start, length = rows[f"{name}offset"], rows[f"{name}length"]
        if ((start < 0) | (length < 0) | (start > ends) | (length > ends - start)).any():
            raise ValueError("a sample after the end of its shard")
    if min(rows["width"].min(), rows["height"].min()) < 0 or not 1 <= rows["orientation"].min() <= 8:
        raise ValueError("an image with a negative size, or an unknown orientation")


def split_key(name: str) -> tuple[str, str]:
    """("dir/a", "seg.png") for "dir/a.seg.png", as webdataset splits; ("", "") for names without a dot or stem."""
    folder, slash, base = name.rpartition("/")
    stem, dot, ending = base.partition(".")
    return (folder + slash + stem, ending.lower()) if stem and dot else ("", "")


def plain_ending(ending: str | None) -> str | None:
    """A normalised ending: without the leading dot, in lower case."""
    return None if ending is None else ending.removeprefix(".").lower() or None


_WITHOUT = "no image in %d of the samples, which are left out: %s; the members of a sample must follow each other"
_SEVERAL = "several images in %d of the samples, of which the first is used: %s; in Python, image=... chooses by ending"


@dataclass
class Oddities:
    """Chooses the image of each sample, and collects oddities for the log.

    Attributes:
        image: ending of the image; None: the first member that is an image.
        caption: ending of the caption; None: no captions.
    """

    image: str | None
    caption: str | None
    _odd: dict[str, list[str]] = field(default_factory=dict)
    _endings: dict[str, None] = field(default_factory=dict)

    def image_of(self, key: str, endings: Collection[str]) -> str | None:
        """The ending of the image among the members of sample `key`; None if there is no image."""
        self._endings.update(dict.fromkeys(endings))
        if self.image is not None:
            images = [ending for ending in endings if ending == self.image]
        else:
            images = [ending for ending in endings if "." + ending.rpartition(".")[2] in IMAGE_EXTENSIONS]
        if len(images) != 1:
            odd = self._odd.setdefault(_SEVERAL if images else _WITHOUT, [])
            odd.append(f"{key} ({', '.join(endings)})" if len(odd) < _SHOWN else "")
        return images[0] if images else None

    def caption_of(self, image: str | None, endings: Collection[str]) -> str | None:
        """The ending of the caption among the members of a sample whose image has the ending `image`; None if there is
        none. Of `a.v2.jpg`, whose key is `a`, it is `v2.txt`."""
        if self.caption is None or self.caption in endings:
            return self.caption
        beside = f"{(image or '').rpartition('.')[0]}.{self.caption}"
        return beside if beside in endings else None

    def warn(self, where: str) -> None:
        """Log what was odd about the samples of `where`."""
        for what, odd in self._odd.items():
            some = ", ".join(odd[:_SHOWN]) + (" and others" if len(odd) > _SHOWN else "")
            _log.warning(f"%s: {what}", one_line(where), len(odd), one_line(some))
        named = any(f".{ending}".endswith(f".{self.caption}") for ending in self._endings)
        if self.caption is not None and self._endings and not named:
            others = one_line(", ".join(f".{ending}" for ending in sorted(self._endings)[:_MOST_ENDINGS]))
            _log.warning(
                "%s: no captions: no member ends in .%s, only in %s; choose another ending with "
                "--caption-extension or caption=...",
                one_line(where),
                self.caption,
                others,
            )


_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BLOCK = 512  # bytes of a member's header
ROW = np.dtype([
    ("shard", "i4"), ("offset", "i8"), ("length", "i8"), ("width", "i4"), ("height", "i4"), ("orientation", "i4"),
    ("caption_offset", "i8"), ("caption_length", "i8"),
])  # fmt: skip
"""A row of `TarIndex.rows`."""

Span = tuple[int, int]
"""Offset and length of a member in its shard."""


def scan_shard(
    caption: str | None, image: str | None, shard: str
) -> tuple[npt.NDArray[Any], list[str], dict[int, str], Oddities]:
    """The rows, keys and reasons of one shard, as in `TarIndex`, and its oddities."""
    rows: list[tuple[int, ...]] = []
    keys: list[str] = []
    reasons: dict[int, str] = {}
    odd = Oddities(image, caption)
    with _opened(shard) as file:
        for key, members in _samples(shard, file):
            ending = odd.image_of(key, members)
            if ending is None:
                continue
            try:
                size = header_of(Region(file, *members[ending]))[:3]
            except UnreadableImageError as error:
                size = 0, 0, 1
                reasons[len(rows)] = str(error)
            rows.append((0, *members[ending], *size, *members.get(odd.caption_of(ending, members) or "", (0, 0))))
            keys.append(key)
    return np.array(rows, dtype=ROW), keys, reasons, odd


@contextmanager
def _opened(shard: str) -> Iterator[io.BufferedReader]:
    """A shard. All readers seek before they read: `tarfile` reads members, and headers of images are in between."""
    try:
        with open_remote(shard) if is_url(shard) else open_input(shard) as file:
            start = file.read(8)
            if packed := next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None):
                raise KohyaBucketError(
                    f"{shard}: compressed with {packed}, so that samples cannot be read at random: unpack it to a "
                    "plain .tar, or read it in order with stream_from_shards"
                )
            file.seek(0)
            yield file
    except KohyaBucketError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:  # the last two for malformed numbers
        raise KohyaBucketError(f"{shard}: cannot be read as a tar file ({error}); copy or build it again") from None


class _TarMember(tarfile.TarInfo):
    """A member of a tar. A damaged header is an error; `tarfile` would take it for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except tarfile.InvalidHeaderError as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"{error} in what follows from byte {tar.offset} on") from None


def _samples(shard: str, file: io.BufferedReader) -> Iterator[tuple[str, dict[str, Span]]]:
    """(key, {ending: (offset, length)}) of each sample, with its members in order."""
    with tarfile.open(fileobj=file, mode="r:", tarinfo=_TarMember) as tar:
        for key, of_key in groupby(_members(shard, tar), itemgetter(0)):
            sample: dict[str, Span] = {}
            for _, ending, member in of_key:
                if ending in sample:
                    raise KohyaBucketError(
                        f"{shard}: {member.name} is twice in one sample, and which one to use is unclear: build the "
                        "shard again without one of them"
                    )
                sample[ending] = member.offset_data, member.size
            yield key, sample
        # `tarfile` stops silently at anything that is no header; only zeros mark the end.
        end = read_at(file, tar.offset, _BLOCK)
        if any(end):
            raise tarfile.ReadError(f"what follows from byte {tar.offset} on is not a member")
        if len(end) < _BLOCK:
            _log.warning("%s: has no end mark: it may be truncated", one_line(shard))


def _members(shard: str, tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """(key, ending, member) of each file that belongs to a sample."""
    for member in tar:
        # Else `tarfile` keeps every member of the shard in memory.
        tar.members = []  # type: ignore[attr-defined]
        check_cancelled()
        if member.issparse():
            raise KohyaBucketError(
                f"{shard}: {one_line(member.name)} is stored as a sparse file, not in one piece: build the shard again "
                "without tar's --sparse"
            )
        if member.size < 0:
            raise KohyaBucketError(
                f"{shard}: {one_line(member.name)} states {member.size} bytes: build the shard again"
            )
        key, ending = split_key(member.name)
        if key and member.isfile():
            yield key, ending, member
