"""WebDataset tar shards: as a `BucketedDataset` where they lie on a disk, as a stream wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from kohya_bucket.buckets.types import BucketRule
from kohya_bucket.datasets.images import BucketedDataset
from kohya_bucket.datasets.sources.tars import TarSource
from kohya_bucket.datasets.streaming import StreamingBuckets
from kohya_bucket.datasets.tar_index import TarIndex
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import IMAGE_EXTENSIONS

__all__ = ["dataset_from_shards", "expand_shards", "stream_from_shards"]


def expand_shards(shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Names of shards from webdataset's notation (`data-{000000..000012}.tar`, `a.tar::b.tar`) or a list.

    Raises:
        KohyaBucketError: the `webdataset` package is missing.
    """
    if not isinstance(shards, (str, os.PathLike)):
        return [name for shard in shards for name in expand_shards(shard)]
    names: list[str] = _webdataset().shardlists.expand_urls(os.fspath(shards))
    return names


def dataset_from_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    strategy: BucketRule,
    *,
    index: str | os.PathLike[str] | None = None,
    caption: str | None = "txt",
    obey_exif: bool = False,
    **options: Any,
) -> BucketedDataset:
    """A `BucketedDataset` over shards on this machine: exact plans, random access, nothing unpacked.

    Args:
        shards: webdataset's notation or a list.
        index: a Parquet file to keep the index in. It is written on the first use; later only shards that are
            new or have changed are read again.
        caption: ending of the member with the caption, such as "txt"; None for no captions.
        obey_exif: turn images upright as their EXIF asks.
        options: `transform`, `interpolation` of `BucketedDataset.from_source`.

    Raises:
        KohyaBucketError: a shard is missing, no tar, or lies behind a URL.
    """
    names = expand_shards(shards)
    for name in names:
        if "://" in name or name.startswith("pipe:"):
            raise KohyaBucketError(f"{name}: random access needs files on this machine; use stream_from_shards")
    before = TarIndex.load(index) if index is not None and Path(index).exists() else None
    built = TarIndex.build(names, caption=caption, before=before)
    if index is not None and (before is None or _identity(before) != _identity(built)):
        built.save(index)
    return BucketedDataset.from_source(TarSource(built, obey_exif=obey_exif), strategy, **options)


def stream_from_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    strategy: BucketRule,
    batch_size: int,
    *,
    caption: str | None = "txt",
    **options: Any,
) -> StreamingBuckets:
    """`StreamingBuckets` over shards anywhere webdataset can read them (files, http, `pipe:` commands).

    Workers share the shards; all ranks read all of them, see `StreamingBuckets`.

    Raises:
        KohyaBucketError: the `webdataset` package is missing.
    """
    _webdataset()
    return StreamingBuckets(
        _Shards(expand_shards(shards), caption), strategy, batch_size, caption_column="caption", name_column="name",
        **options,
    )  # fmt: skip


class _Shards(IterableDataset[dict[str, Any]]):
    """The samples of shards in their order, as mappings of image, caption and name; split among workers."""

    def __init__(self, shards: list[str], caption: str | None) -> None:
        self._shards, self._caption = shards, caption

    def __iter__(self) -> Iterator[dict[str, Any]]:
        wds = _webdataset()
        # Not split by rank: `StreamingBuckets` gives each rank its slice of every batch.
        samples = wds.WebDataset(self._shards, shardshuffle=False, nodesplitter=_whole, empty_check=False)
        for sample in samples:
            for ending, value in sample.items():
                if "." + ending.rpartition(".")[2].lower() in IMAGE_EXTENSIONS:
                    caption = sample.get(self._caption, b"") if self._caption else b""
                    yield {"image": value, "caption": caption, "name": f"{sample['__url__']}#{sample['__key__']}"}
                    break


def _whole(shards: Any) -> Any:
    return shards


def _identity(index: TarIndex) -> tuple[Any, ...]:
    return index.shards, index.stamps, index.caption


def _webdataset() -> Any:
    try:
        import webdataset
        import webdataset.shardlists
    except ImportError:
        raise KohyaBucketError("tar shards need webdataset: pip install 'kohya-bucket[webdataset]'") from None
    return webdataset
