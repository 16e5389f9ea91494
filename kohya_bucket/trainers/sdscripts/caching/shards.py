"""sd-scripts' latent cache as a store of shards, behind every one of its caching strategies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray, Size, as_pair
from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError, LatentStoreError
from kohya_bucket.latents.fingerprint import Stale, StaleReason, why_stale
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import SEQUENCE, StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, common_root, relative_source
from kohya_bucket.latents.store.storage import StorePath, is_there
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.options import AdapterOptions, store_folder
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.door.ranks import wait_for_ranks
from kohya_bucket.trainers.sdscripts.caching.session import CacheItem, as_array
from kohya_bucket.trainers.sdscripts.families import Family
from kohya_bucket.trainers.sdscripts.npz.exchange import npz_item
from kohya_bucket.trainers.sdscripts.objects import HeldDataset, inner_of

logger = logging.getLogger("kohya_bucket")

Values = npt.NDArray[np.float32]
Loaded = tuple[Values, list[int], list[float], "Values | None", "Values | None"]


@dataclass
class ShardCache:
    """sd-scripts' latent cache as a store: keyed by the image's path and its bucket, for every strategy.

    Items that `kohya-bucket precompute` put into the same folder are found too, whatever their collection.

    Args:
        root: the store's folder.
        images_root: folder that the sources are named from when the store is made.
        arch: the model family.
        collection: part of the store that new items go to; the model family where it is "". It holds an image once, so
            datasets that have the same images at different sizes each need their own. It must be the same in all
            processes, whichever of them encodes an image.
    """

    root: StorePath
    images_root: Path
    arch: Family
    collection: str = ""
    _store: LatentStore | None = field(default=None, init=False)
    _writer: StoreWriter | None = field(default=None, init=False)
    _names_from: Path = field(default=Path(), init=False)
    _at: dict[tuple[str, int, int], int] = field(default_factory=dict, init=False)
    _known: dict[tuple[str, int, int], int | None] = field(default_factory=dict, init=False)  # by the image's path

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None}

    def refresh(self) -> None:
        """Look at what is on disk now, what other processes wrote included."""
        if not is_there(Layout(self.root).store_file):
            self._writing()
        if self._store is None:
            self._store = LatentStore(self.root)
        else:
            self._store.refresh()
        store = self._store
        self._names_from = store.layout.images_root()
        if store.is_remote and not self._names_from.is_dir():  # it was made on another machine
            self._names_from = self.images_root
        sources, sizes = store.strings("source"), store.bucket_sizes.tolist()
        # A folder may hold stores of several families; only those of this one are looked at.
        fits = {name: self._fits(info.tensors, info.space) for name, info in store.shards.items()}
        self._known = {}
        # Of an image that several collections hold at one size, the item that was written last counts.
        self._at = {
            (sources[i], *sizes[i]): i
            for i in np.argsort(store.column(SEQUENCE), kind="stable").tolist()
            if fits[store.info(i).name]
        }

    def _fits(self, tensors: Mapping[str, Any], space: LatentSpace) -> bool:
        latents = tensors.get("latents")
        same = space.architecture in ("", self.arch.name) and space.downsample_factor == self.arch.stride
        return same and latents is not None and latents.shape[1] == self.arch.channels

    def holds(self, item: CacheItem) -> bool:
        """Whether the store has the image at that size, made from whatever."""
        return self._find(item.image, item.bucket_reso) is not None

    def stale_reasons(self, item: CacheItem) -> list[StaleReason]:
        """Why the item must be encoded (again); none if the store has it as it should be."""
        i = self._find(item.image, item.bucket_reso)
        if i is None:
            return [StaleReason(Stale.MISSING)]
        entry = self.opened().entry(i)
        if entry.original_size != as_pair(item.original_size):
            return [StaleReason(Stale.SOURCE, "its size differs")]
        wanted, unknown = item.to_compare()
        ignoring = (Stale.DTYPE, *unknown)
        return why_stale(entry.fingerprint, wanted.fingerprint, Path(item.image), ignoring=ignoring)

    def save(
        self, item: CacheItem, latents: Any, crop_ltrb: Iterable[float], flipped: Any = None, alpha_mask: Any = None,
        *, keys: str = "",
    ) -> None:  # fmt: skip
        """Add an item; it is on disk after `flush`. Arguments as `save_latents`; `keys` is for npz."""
        source = self._source(item.image)
        collection, caption = self.collection or self.arch.name, None
        if item.further:
            collection += f" to {item.bucket_reso[0]}x{item.bucket_reso[1]}"
        stale = self._find(item.image, item.bucket_reso)
        if stale is not None:  # is replaced, wherever it is
            old = self.opened().entry(stale)
            collection, caption = old.collection, old.caption
        left, top, right, bottom = (float(side) for side in crop_ltrb)
        mask = None if alpha_mask is None else np.rint(as_array(alpha_mask) * 255).astype(np.uint8)
        original, fingerprint = as_pair(item.original_size), item.fingerprint()
        entry = StoreEntry(source, fingerprint, original, (left, top, right, bottom), caption, collection)
        # as npz have them; copied, since they are written later
        bits = [as_array(part).copy() for part in (latents, flipped) if part is not None]
        mask = None if mask is None or (mask == 255).all() else mask
        self._writing().add(entry, bits[0], flipped=bits[1] if item.flip else None, mask=mask, space=self.arch.space)

    def stored(self, item: CacheItem) -> tuple[Any, Any]:
        return self.load(item.image, item.bucket_reso)[3:]

    def load(self, image: str, bucket_reso: tuple[int, int]) -> Loaded:
        """What a strategy's `load_latents_from_disk` returns: float32 arrays and lists.

        (latents, original size, crop_ltrb, flipped latents or None, alpha mask or None).

        Raises:
            LatentStoreError: the item is not there, or damaged.
        """
        i = self._find(image, bucket_reso)
        if i is None:
            raise LatentStoreError(
                f"{image} has no latent for {bucket_reso[0]}x{bucket_reso[1]} in {self.root}: cache again"
            )
        self.opened().expect([i])
        item = npz_item(self.opened(), i, self.arch)
        return item.latents, list(item.original_size), list(item.crop_ltrb), item.flipped, item.alpha_mask

    def shard_of(self, image: str, bucket_reso: tuple[int, int]) -> str:
        """Address of the shard that holds an item; "" where none does."""
        i = self._find(image, bucket_reso)
        return "" if i is None else f"{self.root}/{self.opened().info(i).name}"

    def serve(self, dataset: HeldDataset, strategy: Any, items: Iterable[tuple[str, Size]]) -> None:
        """Let the loaders of a dataset, whose latents are all here, read these images and bucket sizes from here."""
        # looked for now, and not each when it is read
        wanted = [(str(image), int(size[0]), int(size[1])) for image, size in items]
        images = [image for image, _, _ in wanted]
        sources = relative_source(images, self._names_from)
        self._known = {key: self._at.get((source, *key[1:])) for key, source in zip(wanted, sources, strict=True)}
        _caches[dataset] = self
        # Stays: loader workers read through it.
        readers: dict[str, ShardCache] = getattr(strategy, "_kohya_bucket_readers", {})
        readers.update(dict.fromkeys(images, self))
        strategy._kohya_bucket_readers = readers
        strategy.load_latents_from_disk = partial(_load, readers)  # travels to spawned workers

    def flush(self) -> None:
        """Put on disk what was added."""
        if self._writer is not None:
            self._writer.flush()

    def finish(self) -> None:
        """Put on disk what every process has added, with a manifest of all, and see it."""
        self.flush()
        wait_for_ranks()
        if is_first_process():
            self.refresh()
            write_manifest(self.opened())
        wait_for_ranks()
        self.refresh()

    def _writing(self) -> StoreWriter:
        if self._writer is None:
            self._writer = StoreWriter(self.root, images_root=self.images_root)
        return self._writer

    def opened(self) -> LatentStore:
        if self._store is None:
            self.refresh()
        assert self._store is not None
        return self._store

    def _find(self, image: str, bucket_reso: tuple[int, int]) -> int | None:
        key = image, int(bucket_reso[0]), int(bucket_reso[1])
        if key not in self._known:
            source = self._source(image)  # which opens the store
            self._known[key] = self._at.get((source, *key[1:]))
        return self._known[key]

    def _source(self, image: str) -> str:
        self.opened()
        return relative_source([image], self._names_from)[0]


def cache_of_run(images: Sequence[str], arch: Family, dataset: HeldDataset, options: AdapterOptions) -> ShardCache:
    """The store that a dataset's latents go into, as it is now."""
    collection = f"{arch.name} {dataset.width}x{dataset.height}"
    cache = ShardCache(store_folder(options, images[0]), common_root(images, None), arch, collection=collection)
    cache.refresh()
    if is_first_process():
        logger.info("latents are kept in %s", one_line(cache.root))
    return cache


def _load(readers: dict[str, ShardCache], path: str, bucket_reso: tuple[int, int]) -> Any:
    return readers[path].load(path, bucket_reso)


_caches: WeakKeyDictionary[Any, ShardCache] = WeakKeyDictionary()  # of datasets whose latents are all in a store


def is_in_store(dataset: HeldDataset) -> bool:
    """Whether a dataset's latents are read from a store; so are those of one without images."""
    return inner_of(dataset) in _caches or not inner_of(dataset).image_data


def shard_numbers(datasets: Sequence[HeldDataset], images: Sequence[PlacedDataset], open_shards: int) -> IntArray:
    """[N] number of the shard of each image of all datasets; 0 for those that are never trained.

    Each shard that is read from is kept on this node for a while from now on, also of a store larger than the limit.

    Raises:
        ConfigError: a dataset's latents are not in shards.
    """
    names: list[str] = []
    for dataset, placed in zip(datasets, images, strict=True):
        cache = _caches.get(inner_of(dataset))
        if cache is None:
            raise ConfigError(
                "[kohya_bucket] order is 'local', but latents are not cached in shards: train with --cache_latents "
                "and --cache_latents_to_disk, or leave order out"
            )
        cache.opened().keep_shards(open_shards)
        records = dataset.image_data
        placement = placed.placement
        for key, size, is_placed in zip(placed.keys, placement.bucket_sizes.tolist(), placement.placed, strict=True):
            names.append(cache.shard_of(records[key].absolute_path, (size[0], size[1])) if is_placed else "")
    return np.unique(np.array(names, dtype=object), return_inverse=True)[1].astype(np.int32)
