"""The cache of latents: which images have none that serve, and whole files or shards for those that are encoded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from kohya_bucket.buckets.sizes import Size, as_pair
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.listing import file_key
from kohya_bucket.latents.encode.pipeline import Caching
from kohya_bucket.latents.fingerprint import Stale, StaleReason, module_hash, source_now
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.ranks import stop_all_ranks_on_error, warn_once
from kohya_bucket.trainers.sdscripts.caching.encode import Condition, EncodingLoop, Load
from kohya_bucket.trainers.sdscripts.caching.extra_sizes import SizedPath
from kohya_bucket.trainers.sdscripts.caching.npz_cache import NpzCache, TrainersNpz
from kohya_bucket.trainers.sdscripts.caching.session import (
    CacheItem,
    Requested,
    architecture_read_by,
    replaced,
    shared_by,
)
from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache, cache_of_run
from kohya_bucket.trainers.sdscripts.families import Family
from kohya_bucket.trainers.sdscripts.npz.names import NpzNames, refuse_too_long
from kohya_bucket.trainers.sdscripts.wording import say_recached

logger = logging.getLogger("kohya_bucket")


@stop_all_ranks_on_error()
def cache_latents(
    dataset: Any, strategy: Any, model: Any, accelerator: Any, load: Load, options: AdapterOptions
) -> None:
    """`BaseDataset.new_cache_latents`: what has no latents yet is encoded by the strategy, see `encode.py`.

    As there, every process encodes for itself what stays in memory, and its share of what goes to disk; `load` is the
    trainer's `load_images_and_masks_for_caching`.
    """
    processes, process = int(accelerator.num_processes), int(accelerator.process_index)
    infos = sorted(dataset.image_data.values(), key=lambda info: info.bucket_reso[0] * info.bucket_reso[1])
    infos = [info for info in infos if info.latents_npz is None]
    if not strategy.cache_to_disk or not infos:
        caching = Caching("latent", len(infos), keep=lambda _: None, stays=False)
        with caching.running():
            loop = EncodingLoop(strategy, model, load, options, caching, to_disk=False)
            loop.run(_in_batches(dataset, infos), processes)
        caching.say_speed()
        return
    arch = architecture_read_by(strategy)
    _check_what_is_asked(strategy, arch, options)
    session = CachingSession(dataset, strategy, arch, options, _hash_of(model))
    for info in infos:
        info.latents_npz = session.path_of(info)
    share = infos[process::processes]
    missing = [info for info in share if not session.is_expected(info)]
    caching = Caching(
        "latent", len(missing), len(share) - len(missing), keep=session.save_all, flush=session.cache.flush,
        processes=processes,
    )  # fmt: skip
    loop = EncodingLoop(strategy, model, load, options, caching, to_disk=True)
    with caching.running(), replaced(strategy, {"save_latents_to_disk": loop.take}):
        loop.run(_in_batches(dataset, missing), processes)
    caching.say_speed()
    session.finish()
    say_recached(session.reasons)


def _in_batches(dataset: Any, infos: Iterable[Any]) -> list[tuple[Any, Condition]]:
    """Images with what those of a batch have in common, small buckets first, neighbours alike."""
    out = []
    for info in infos:
        subset = dataset.image_to_subset[info.image_key]
        switches = bool(subset.flip_aug), bool(subset.alpha_mask), bool(subset.random_crop)
        out.append((info, Condition(as_pair(info.bucket_reso), *switches)))
    return sorted(out, key=lambda one: (one[1].bucket[0] * one[1].bucket[1], one[1]))


def _check_what_is_asked(strategy: Any, arch: Family, options: AdapterOptions) -> None:
    """Say, once for all datasets, which checks of caches on disk a family or a switch of the trainer rules out.

    Raises:
        ConfigError: options that would be without effect.
    """
    ending = strategy.cache_suffix
    if not arch.channels and options.latent_cache == "shards":
        raise ConfigError(
            f"[kohya_bucket] latent_cache = 'shards' needs a model family that kohya_bucket knows, and caches that "
            f"end in {ending} belong to none: leave it out to keep npz, or update kohya-bucket"
        )
    skips = bool(strategy.skip_disk_cache_validity_check)
    if skips and options.focus:
        raise ConfigError(
            "[kohya_bucket] focus is set, but --skip_cache_check trains cached latents unchecked, those of other crops "
            "too: leave out one of them"
        )
    if not arch.channels:
        warn_once(
            f"caches that end in {ending} belong to a model family that kohya_bucket does not know: image, size, crop "
            "and VAE are compared, and sd-scripts alone checks their shape"
        )
    if skips:
        warn_once(
            "--skip_cache_check: cached latents are trained unchecked, even if an image was edited since, the VAE "
            "changed, or a file is cut off"
        )


_hashes: WeakKeyDictionary[Any, tuple[object, str]] = WeakKeyDictionary()


def _hash_of(model: Any) -> str:
    """Hash of a VAE's weights, computed once per run and not for each dataset; "" for what has none."""
    if not hasattr(model, "state_dict"):
        return ""
    # these numbers change with any change of the weights
    state = [(tensor.data_ptr(), tensor._version) for tensor in model.state_dict().values()]
    hashed_state, digest = _hashes.get(model, (None, ""))
    if hashed_state != state:
        digest = module_hash(model)
        _hashes[model] = state, digest
    return digest


# One caching call. For its time, methods of sd-scripts' strategy *object* are replaced; its classes are not touched.


@dataclass
class CachingSession:
    """What each cache path stands for, and why some are made again.

    Attributes:
        items: by cache path and bucket.
        sizes: the buckets that a cache path holds.
        paths: cache path by image, and by size where that is not the image's own.
        shared: what datasets before this one need of an item that is theirs too, by cache path and bucket.
        reasons: why an image is encoded again.
    """

    dataset: Any
    strategy: Any
    arch: Family
    options: AdapterOptions
    vae: str
    items: dict[tuple[str, Size], CacheItem] = field(default_factory=dict)
    paths: dict[tuple[str, Size | None], str] = field(default_factory=dict)
    sizes: dict[str, list[Size]] = field(default_factory=dict)
    shared: Requested = field(default_factory=dict)
    reasons: dict[str, list[StaleReason]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        infos = list(self.dataset.image_data.values())
        # What the datasets before this one asked for stays in files that they share.
        shared = shared_by(self.strategy)
        earlier = [requested for dataset, requested in shared.requested if dataset() is not None]
        requested_here: Requested = {}
        shared.requested.append((ref(self.dataset), requested_here))
        images = [str(info.absolute_path) for info in infos]
        in_shards = self.options.latent_cache == "shards"
        # In shards, where no item has a file of its own, its image's path takes the place of it.
        paths = images if in_shards else self._npz_paths(images, infos)
        # One item for each image and size; a file may hold several.
        for info, image, path in zip(infos, images, paths, strict=True):
            subset = self.dataset.image_to_subset[info.image_key]
            self.paths[image, _variant_size(info.absolute_path)] = path
            bucket = tuple(info.bucket_reso)
            self.sizes.setdefault(path, []).append(bucket)
            self.items[path, bucket] = item = CacheItem(
                image=image,
                bucket_reso=info.bucket_reso,
                original_size=tuple(info.image_size),
                flip=bool(subset.flip_aug),
                alpha_mask=bool(subset.alpha_mask),
                resized_size=info.resized_size,
                vae=self.vae,
                interpolation=info.resize_interpolation,
                further=isinstance(info.absolute_path, SizedPath),
                path=path,
                source=source_now(image),
            )
            key = file_key(image), bucket
            requested_here[key] = item.flip, item.alpha_mask
            if before := [requested[key] for requested in earlier if key in requested]:
                self.shared[path, bucket] = any(flip for flip, _ in before), any(mask for _, mask in before)
        self.cache: NpzCache | ShardCache
        if in_shards:
            self.cache = cache_of_run(images, self.arch, self.dataset, self.options)
        else:
            self.cache = NpzCache(self.arch) if self.arch.channels else TrainersNpz(self.arch, strategy=self.strategy)

    def _npz_paths(self, images: list[str], infos: list[Any]) -> list[str]:
        shared = shared_by(self.strategy)
        shared.names = shared.names or NpzNames(self.arch)
        names = ("image_size", "bucket_reso", "resized_size")
        sizes, buckets, resized = ([as_pair(getattr(info, name)) for info in infos] for name in names)
        further = [isinstance(info.absolute_path, SizedPath) for info in infos]
        name_of = self.strategy.get_latents_npz_path
        paths = list(map(str, shared.names.add(images, sizes, buckets, resized, further, name_of)))
        refuse_too_long(zip(images, paths, strict=True), "set [kohya_bucket] latent_cache = 'shards'")
        return paths

    def finish(self) -> None:
        self.cache.finish()
        if isinstance(self.cache, ShardCache):
            self.cache.serve(self.dataset, self.strategy, self.items)

    def path_of(self, info: Any) -> str:
        return self.paths[str(info.absolute_path), _variant_size(info.absolute_path)]

    def is_expected(self, info: Any) -> bool:
        """Whether an image has the latents on disk that it should have; if not, why is noted."""
        item = self.items[info.latents_npz, as_pair(info.bucket_reso)]
        if self.strategy.skip_disk_cache_validity_check and self.cache.holds(item):
            return True
        reasons = self.cache.stale_reasons(item)
        if any(reason.kind is not Stale.MISSING for reason in reasons):
            self.reasons[item.image] = reasons
        return not reasons

    def save_all(self, images: Iterable[tuple[Any, ...]]) -> None:
        """Keep what a strategy would have saved of some images; all of it on one thread."""
        for arguments in images:
            self._save(*arguments)

    def _save(
        self, path: str, latents: Any, original_size: Any, crop_ltrb: Any, flipped: Any = None, alpha_mask: Any = None,
        key_reso_suffix: str = "",
    ) -> None:  # fmt: skip
        # The strategy does not say the bucket: the latents' shape does.
        sizes = self.sizes[path]
        size = next((one for one in sizes if self.arch.shape(one)[-2:] == tuple(latents.shape[-2:])), sizes[0])
        item = self.items[path, size]
        # An earlier dataset's flipped latents and masks, which this one does not ask for, are kept if they still serve.
        flip, mask = self.shared.get((path, size), (False, False))
        kept = replace(item, flip=flip and flipped is None, alpha_mask=mask and alpha_mask is None)
        if (kept.flip or kept.alpha_mask) and not self.cache.stale_reasons(kept):
            stored_flipped, stored_mask = self.cache.stored(item)
            flipped = stored_flipped if kept.flip else flipped
            alpha_mask = stored_mask if kept.alpha_mask else alpha_mask
            item = replace(item, flip=flipped is not None, alpha_mask=alpha_mask is not None)
        self.cache.save(item, latents, crop_ltrb, flipped, alpha_mask, keys=key_reso_suffix)


def _variant_size(path: str) -> Size | None:
    return path.bucket if isinstance(path, SizedPath) else None
