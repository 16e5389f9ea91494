"""The cache of latents: sd-scripts' own loops over images, with checked and whole files, or shards, under them.

Caching goes on without images that cannot be read: sd-scripts would end in a traceback, after hours perhaps.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from PIL import Image

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.ranks import is_first_process, stop_all_ranks_on_error, wait_for_ranks
from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import ConfigError, KohyaBucketError, LatentStoreError
from kohya_bucket.files import GroupedSync
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.images.listing import file_key
from kohya_bucket.images.pixels import NO_IMAGE
from kohya_bucket.latents.fingerprint import Reason, module_hash
from kohya_bucket.latents.npz.check import holds_npz
from kohya_bucket.latents.npz.names import NpzNames
from kohya_bucket.latents.npz.read_write import read_npz
from kohya_bucket.sdscripts.caching.extra_sizes import SizedPath
from kohya_bucket.sdscripts.caching.session import (
    CacheItem,
    CachingSession,
    architecture_of,
    architecture_read_by,
    ensure_npz_current,
    replaced,
    save_latents,
    shared_by,
)
from kohya_bucket.sdscripts.caching.shards import ShardSession
from kohya_bucket.sdscripts.objects import HeldDataset, ImageRecord, inner_of
from kohya_bucket.sdscripts.wording import recached_lines
from kohya_bucket.texts import one_line

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]


@stop_all_ranks_on_error()
def cache_latents(
    dataset: Any, original: Original, strategy: Any, model: Any, accelerator: Any, options: AdapterOptions
) -> None:
    """`BaseDataset.new_cache_latents`, with the cache of this package under it where latents go to disk."""
    in_shards, arch = options.latent_cache == "shards", None
    if strategy is not None and strategy.cache_to_disk:
        arch = architecture_of(strategy.cache_suffix) if in_shards else architecture_read_by(strategy)

    def cache() -> None:
        original(dataset, model, accelerator)

    if arch is None or not dataset.image_data:
        cache_the_readable(dataset, cache, options)
        return
    kind = ShardSession if in_shards else NpzSession
    session = kind(dataset, strategy, arch, options, _hash_of(model))
    with replaced(strategy, session.methods()):
        try:
            cache_the_readable(dataset, cache, options)
        except BaseException:
            session.keep()
            raise
    session.finish()
    if is_first_process() and session.reasons:
        logger.warning("\n".join(recached_lines(session.reasons)))


_hashes: WeakKeyDictionary[Any, tuple[object, str]] = WeakKeyDictionary()


def _hash_of(model: Any) -> str:
    """Hash of a VAE's weights, computed once per run and not for each data set; "" for what has none."""
    if not hasattr(model, "state_dict"):
        return ""
    # these numbers change with any change of the weights
    state = [(tensor.data_ptr(), tensor._version) for tensor in model.state_dict().values()]
    known = _hashes.get(model)
    if known is None or known[0] != state:
        known = _hashes[model] = (state, module_hash(model))
    return known[1]


# Latents in sd-scripts' own npz files, for one caching call.


class NpzSession(CachingSession):
    """sd-scripts' own npz files and names, each written whole and checked before it counts.

    Attributes:
        moved: how many latents of other versions' files were put where this sd-scripts finds them.
    """

    moved: int = 0
    _pool: ThreadPoolExecutor | None = None
    _groups: GroupedSync | None = None

    def paths_of(self, infos: list[Any]) -> list[str]:
        shared = shared_by(self.strategy)
        shared.names = shared.names or NpzNames(self.arch)
        paths = shared.names.add(
            [str(info.absolute_path) for info in infos],
            [as_pair(info.image_size) for info in infos],
            [as_pair(info.bucket_reso) for info in infos],
            [as_pair(info.resized_size) for info in infos],
            [isinstance(info.absolute_path, SizedPath) for info in infos],
            self.strategy.get_latents_npz_path,
        )
        return [str(path) for path in paths]

    def exists(self, path: str, item: CacheItem) -> bool:
        return holds_npz(Path(path), as_pair(item.bucket_reso), self.arch)

    def why_missing(self, path: str, item: CacheItem) -> list[Reason]:
        """Also puts latents that serve where this sd-scripts finds them: another version may have written them."""
        reasons, moved = ensure_npz_current(path, item, self.arch)
        self.moved += moved
        return reasons

    def save(
        self, path: str, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, sized: bool
    ) -> None:
        save_latents(path, item, self.arch.with_sizes(sized), latents, crop_ltrb, flipped, alpha_mask, sync=False)
        if self._groups is None:
            self._pool = ThreadPoolExecutor(4, thread_name_prefix="kohya-bucket-npz")
            self._groups = GroupedSync(self._pool)
        self._groups.add(Path(path))

    def stored(self, path: str, item: CacheItem) -> tuple[Any, Any]:
        found = read_npz(Path(path), as_pair(item.bucket_reso), self.arch)
        return found.flipped, found.alpha_mask

    def keep(self) -> None:
        with suppress(LatentStoreError):  # there is an error already
            self._wait_for_the_disk()

    def _wait_for_the_disk(self) -> None:
        if self._groups is None or self._pool is None:
            return
        try:
            self._groups.finish()
        finally:
            self._pool.shutdown()
            self._pool = self._groups = None

    def finish(self) -> None:
        self._wait_for_the_disk()
        if self.moved:
            logger.info("%d latents were cached by another version, and are put where this one finds them", self.moved)
        wait_for_ranks()


_DONE = "cached, or not to be read"  # in the place of a file's name: sd-scripts' loop passes by

FindBad = Callable[[Iterable[Any]], Iterable[tuple[Any, BaseException]]]


def cache_the_readable(
    dataset: Any, cache: Callable[[], None], options: AdapterOptions, find_bad: FindBad | None = None,
    at_fault: tuple[type[Exception], ...] = (Exception,),
) -> None:  # fmt: skip
    """Run sd-scripts' loop over a dataset's images, and again without those that it stumbles over.

    Such images are left without latents: training finds them unreadable in its turn, and leaves them out.

    Args:
        find_bad: which of the images that have no latents yet ended the loop, each with its error; by default those
            that sd-scripts could not load ahead.
        at_fault: errors that may be an image's fault.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
        Exception: as sd-scripts raised it, where no image is at fault.
    """
    mine = [info for info in dataset.image_data.values() if info.latents_npz is None]
    left = mine
    try:
        while True:
            try:
                cache()
                return
            except at_fault:
                left = [info for info in left if getattr(info, "latents", None) is None]
                found = list((find_bad or not_loaded_ahead)(left))
                if not found:
                    raise
                for info, why in found:
                    tell(info, why, options)
                    info.image = None
                bad = {id(info) for info, _ in found}
                left = [info for info in left if id(info) not in bad]
                # Each process takes every so many images of the list, which must therefore stay as long as it is.
                for info in mine:
                    info.latents_npz = _DONE
                for info in left:
                    info.latents_npz = None
    finally:
        for info in mine:
            if info.latents_npz == _DONE:
                info.latents_npz = None


def tell(info: Any, why: BaseException, options: AdapterOptions) -> None:
    """Name an image that cannot be cached.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
    """
    line = not_loaded(why)
    if options.on_bad_image == "stop":
        raise KohyaBucketError(f"{info.absolute_path}: {line}: repair or remove it, or leave on_bad_image out")
    logger.warning("%s", one_line(f"{info.absolute_path} is left out: {line}"))


def not_loaded_ahead(infos: Iterable[Any]) -> Iterator[tuple[Any, BaseException]]:
    """The images that sd-scripts loads ahead, on other threads, and could not load."""
    for info in infos:
        ahead = info.image
        if isinstance(ahead, Future) and ahead.done() and not ahead.cancelled() and (why := ahead.exception()):
            yield info, why


def cache_the_readable_plainly(dataset: Any, cache: Callable[[], None], options: AdapterOptions) -> None:
    """The same for sd-scripts until 0.9, which caches without strategies and loads each image in its batch."""
    # anything else, such as a GPU without memory, is no image's fault
    cache_the_readable(dataset, cache, options, _first_unreadable, NO_IMAGE)


def _first_unreadable(infos: Iterable[Any]) -> Iterator[tuple[Any, BaseException]]:
    """The image at which the loop ended: it takes small buckets first, and those without a file."""
    in_order = sorted(infos, key=lambda info: info.bucket_reso[0] * info.bucket_reso[1])
    for info in sorted(in_order, key=lambda info: bool(info.latents_npz) and os.path.exists(info.latents_npz)):  # noqa: PTH110
        try:
            with Image.open(info.absolute_path) as image:
                image.load()
        except NO_IMAGE as error:
            yield info, error
            return


# Caching without strategies, as sd-scripts 0.9 does: one file on disk for each image, with one size in it.


def check_one_size_each(datasets: Sequence[HeldDataset]) -> None:
    """Refuse datasets that need different things in an image's file on disk: they would overwrite each other's.

    These are sizes, and alpha masks, which are trained with where they are there.

    Images whose latents were made beforehand are not looked at.

    Raises:
        ConfigError: naming the two datasets and an image.
    """
    first: dict[str, tuple[int, tuple[int, int], bool]] = {}
    for number, dataset in enumerate(datasets, start=1):
        owner = inner_of(dataset)
        records: list[ImageRecord] = list(owner.image_data.values())
        for info in records:
            if info.latents_npz is not None:
                continue
            size = as_pair(info.bucket_reso)
            mask = bool(owner.image_to_subset[info.image_key].alpha_mask)
            key = file_key(info.absolute_path)
            earlier, size_before, mask_before = first.setdefault(key, (number, size, mask))
            if earlier == number or (size, mask) == (size_before, mask_before):
                continue
            how = f"at {size_before[0]}x{size_before[1]} and {size[0]}x{size[1]}"
            if size == size_before:
                how = f"{'with' if mask_before else 'without'} alpha_mask and {'with' if mask else 'without'}"
            raise ConfigError(
                f"datasets {earlier} and {number} both have {info.absolute_path}, {how}, but this way of caching has "
                "one file on disk for each image: give each dataset a folder of its own, leave "
                "--cache_latents_to_disk out (--cache_latents alone keeps latents in memory), or train with "
                "sd-scripts 0.10"
            )
