"""WebDataset tar shards: as a `BucketedDataset` where they lie on a disk, as a stream wherever they lie."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from kohya_bucket.buckets.rule import BucketRule, check_rule
from kohya_bucket.checks import as_flag
from kohya_bucket.datasets.captions import caption_of_file, warn_uncaptioned
from kohya_bucket.datasets.images import BucketedDataset
from kohya_bucket.datasets.items import ItemKeywords, ItemSettings
from kohya_bucket.datasets.sources import CellSource, SourceSizes
from kohya_bucket.datasets.streaming import StreamingBuckets, StreamKeywords
from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.extras import pip_install
from kohya_bucket.images.formats import UnreadableImageError, explain_os_error
from kohya_bucket.images.stamps import read_unchanged
from kohya_bucket.images.tar_index import Oddities, TarIndex, plain_ending


class TarSource(CellSource):
    """The samples of a `TarIndex`. Nothing is unpacked, and no file stays open between samples.

    Raises:
        KohyaBucketError: a shard has changed since it was indexed.
    """

    def __init__(self, index: TarIndex, *, obey_exif: bool = False) -> None:
        if not index.is_current():
            raise KohyaBucketError("a shard has changed or gone since it was indexed: build the index again")
        self.index = index
        self._obey_exif = as_flag("obey_exif", obey_exif)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shards(self) -> npt.NDArray[np.int32]:
        """[N] number of the shard that each image lies in."""
        return np.ascontiguousarray(self.index.rows["shard"])

    def read_sizes(self) -> SourceSizes:
        sizes = self.index.sizes
        if self._obey_exif:
            sizes = np.where((self.index.rows["orientation"] >= 5)[:, None], sizes[:, ::-1], sizes)
        failures = [(i, self.name(i), reason) for i, reason in sorted(self.index.reasons.items())]
        return SourceSizes(sizes, failures)

    def cell(self, index: int) -> bytes:
        return self._bytes(index, "")

    def caption(self, index: int) -> str:
        if not self.index.rows[index]["caption_length"]:
            return ""
        return caption_of_file(self._bytes(index, "caption_"), f"{self.name(index)}.{self.index.caption}")

    def name(self, index: int) -> str:
        return self.index.name(index)

    def _bytes(self, index: int, what: str) -> bytes:
        row = self.index.rows[index]
        shard, stamp = self.index.shards[row["shard"]], self.index.stamps[row["shard"]]
        try:
            return read_unchanged(shard, stamp, int(row[f"{what}offset"]), int(row[f"{what}length"]))
        except OSError as error:
            raise UnreadableError(f"{shard}: this shard cannot be read now ({explain_os_error(error)})") from error


if TYPE_CHECKING:
    from typing_extensions import Unpack

_IDENTITY = attrgetter("shards", "stamps", "caption", "image")


def expand_shards(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Names of shards from webdataset's notation (`data-{000000..000012}.tar`, `a.tar::b.tar`) or a list.

    Raises:
        KohyaBucketError: the `webdataset` package is missing, a brace is not closed, or a variable is not set.
    """
    if not isinstance(shards, (str, os.PathLike)):
        return [name for shard in shards for name in expand_shards(shard)]
    webdataset = _webdataset()
    try:  # a backslash of Windows would be an escape there
        names: list[str] = webdataset.shardlists.expand_urls(os.fspath(shards).replace(os.sep, "/"))
    except (ValueError, AssertionError) as error:
        raise KohyaBucketError(f"{shards}: is not a list of shards in webdataset's notation ({error})") from error
    return names


def dataset_from_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    rule: BucketRule,
    *,
    index: str | os.PathLike[str] | None = None,
    image: str | None = None,
    caption: str | None = "txt",
    obey_exif: bool = False,
    **settings: Unpack[ItemKeywords],
) -> BucketedDataset:
    """A `BucketedDataset` over shards on this machine: exact plans, random access, nothing unpacked.

    Args:
        shards: webdataset's notation or a list.
        rule: as for `BucketedDataset`.
        index: a Parquet file to keep the index in. It is written on the first use; later only shards that are
            new or have changed are read again.
        image: ending of the member that is the image, such as "jpg"; None: the first image of a sample.
        caption: ending of the member with the caption, such as "txt", or "json" for a text under the key "caption";
            None for no captions.
        obey_exif: turn images upright as their EXIF asks.
        settings: transform, pixel_range, interpolation and on_bad_image, as for `BucketedDataset`.

    Raises:
        KohyaBucketError: a shard is missing, no tar, compressed, changed while it is used, or behind a URL.

    Examples:
        >>> dataset = dataset_from_shards("photos-{000..001}.tar", KohyaBuckets.for_arch("sd"))
        >>> len(dataset), dataset[0]["caption"]
        (6, 'a photo')
    """
    check_rule(rule)
    ItemSettings(**settings)
    names = expand_shards(shards)
    for name in names:
        if "://" in name or name.startswith("pipe:"):
            raise KohyaBucketError(f"{name}: random access needs files on this machine; use stream_from_shards")
    before = TarIndex.load(index) if index is not None and Path(index).exists() else None
    built = TarIndex.build(names, caption=caption, image=image, before=before)
    if index is not None and (before is None or _IDENTITY(before) != _IDENTITY(built)):
        built.save(index)
    if built.caption is not None:
        bare = [built.name(i) for i in np.flatnonzero(built.rows["caption_length"] == 0).tolist()]
        warn_uncaptioned(bare, len(built), f".{built.caption} member")
    return BucketedDataset.from_source(TarSource(built, obey_exif=obey_exif), rule, **settings)


def stream_from_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    rule: BucketRule,
    batch_size: int,
    *,
    image: str | None = None,
    caption: str | None = "txt",
    **options: Unpack[StreamKeywords],
) -> StreamingBuckets:
    """`StreamingBuckets` over shards anywhere webdataset can read them (files, http, `pipe:` commands; gzip, too).

    Workers share the shards; all ranks read all of them, see `StreamingBuckets`. `image` and `caption` are as for
    `dataset_from_shards`.

    Raises:
        KohyaBucketError: no shards, or the `webdataset` package is missing; in a pass: a shard that cannot be read.

    Examples:
        >>> stream = stream_from_shards("photos-{000..001}.tar", KohyaBuckets.for_arch("sd"), 2, buffer_size=4)
        >>> sum(len(batch["caption"]) for batch in stream)
        6
    """
    names = expand_shards(shards)
    if not names:
        raise KohyaBucketError("no shards: the list of tar files is empty")
    # webdataset takes what stands before a colon, such as a drive of Windows, for a protocol.
    names = [f"file:{name}" if ":" in name and Path(name).is_file() else name for name in names]
    return StreamingBuckets(
        _Shards(names, plain_ending(image), plain_ending(caption)), rule, batch_size,
        caption_column=None if plain_ending(caption) is None else "caption", name_column="name", **options,
    )  # fmt: skip


class _Shards(IterableDataset[dict[str, Any]]):
    """The samples of shards in their order, as mappings of image, caption and name; split among workers."""

    def __init__(self, shards: list[str], image: str | None, caption: str | None) -> None:
        self._shards, self._image, self._caption = shards, image, caption

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._samples()
        except KohyaBucketError:
            raise
        except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            # webdataset adds the stream and its name to what the error holds, where it knows them.
            why = error.strerror if isinstance(error, FileNotFoundError) else error.args[0] if error.args else error
            named = [part for part in (*error.args, getattr(error, "filename", None)) if part in self._shards]
            where = named[-1] if named else self._described()
            raise KohyaBucketError(f"{where}: cannot be read as a tar file ({why}); copy or build it again") from error

    def _samples(self) -> Iterator[dict[str, Any]]:
        wds = _webdataset()
        odd = Oddities(self._image, self._caption)
        # Not split by rank: `StreamingBuckets` gives each rank its slice of every batch.
        samples = wds.WebDataset(self._shards, shardshuffle=False, nodesplitter=iter, empty_check=False)
        for sample in samples:
            name = f"{sample['__url__']}#{sample['__key__']}"
            endings = [ending for ending in sample if not ending.startswith("__")]
            ending = odd.image_of(sample["__key__"], endings)
            missing = UnreadableImageError(f"no image in this sample, only {', '.join(endings)}")
            member = odd.caption_of(ending, endings)
            caption = None if member is None else caption_of_file(sample[member], f"{name}.{member}")
            yield {"image": missing if ending is None else sample[ending], "caption": caption, "name": name}
        odd.warn(self._described())

    def _described(self) -> str:
        first, last = self._shards[0], self._shards[-1]
        return first if len(self._shards) == 1 else f"{len(self._shards)} shards, {first} to {last}"


def _webdataset() -> Any:
    try:
        import webdataset
        import webdataset.shardlists
    except ImportError:
        raise KohyaBucketError(f"tar shards need webdataset: {pip_install('webdataset')}") from None
    return webdataset
