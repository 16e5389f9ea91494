"""One call of sd-scripts' own loop over images, with a cache of this package under it, and one image of that call.

Nothing here imports sd-scripts. For the time of the call, some methods of sd-scripts' strategy *object* are replaced;
its classes are not touched. sd-scripts goes on deciding what is encoded in which batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.patching import Patches, Replacement
from kohya_bucket.buckets.geometry import covering_sizes
from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.images.listing import file_key
from kohya_bucket.images.resize import choose_interpolation, resampler
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale, source_identity
from kohya_bucket.latents.items import Caption
from kohya_bucket.latents.npz.check import settle_npz
from kohya_bucket.latents.npz.names import NpzNames
from kohya_bucket.latents.npz.read_write import NpzLatents, write_arrays, write_npz
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.sdscripts.caching.extra_sizes import SizedPath
from kohya_bucket.sdscripts.objects import CutSize


@dataclass(frozen=True)
class CacheItem:
    """One image as the trainer wants it cached; sizes are (width, height).

    Attributes:
        image: the file.
        bucket_reso, resized_size: of the trainer's own placement; None for the usual resize to cover the bucket.
        flip, alpha_mask: whether the subset asks for them.
        vae: hash of the VAE's weights, "" where it is not known yet: then it is not compared.
        interpolation: sd-scripts' `resize_interpolation`, None for its default.
        further: a size besides the bucket that sd-scripts knows of.
    """

    image: str
    bucket_reso: tuple[int, int]
    original_size: tuple[int, int]
    flip: bool = False
    alpha_mask: bool = False
    resized_size: tuple[int, int] | None = None
    vae: str = ""
    interpolation: str | None = None
    further: bool = False

    def fingerprint(self, dtype: str = "float32") -> Fingerprint:
        """What the item's latents depend on, with the image file as it is now.

        Raises:
            OSError: the image is gone.
        """
        return self._fingerprint(dtype, *source_identity(self.image)[:2])

    def to_compare(self, dtype: str = "float32") -> tuple[StoreEntry, tuple[Stale, ...]]:
        """The item as stored latents of it must be, and what of it cannot be compared, as `why_stale` ignores it.

        That is a VAE whose hash is not known yet, and an image that is gone: a cache outlives it.
        """
        unknown = () if self.vae else (Stale.VAE,)
        try:
            fingerprint = self.fingerprint(dtype)
        except OSError:
            fingerprint, unknown = self._fingerprint(dtype, -1, -1), (*unknown, Stale.SOURCE)
        entry = StoreEntry(Path(self.image).name, fingerprint, as_pair(self.original_size), (0.0, 0.0, 0.0, 0.0))
        return entry, unknown

    def _fingerprint(self, dtype: str, nbytes: int, mtime: int) -> Fingerprint:
        resized = self.resized_size or as_pair(
            covering_sizes(np.array([self.original_size]), np.array([self.bucket_reso]))[0]
        )
        name = "none"
        if tuple(resized) != tuple(self.original_size):
            name = choose_interpolation(self.original_size, resized, self.interpolation)
            shrinks = all(after <= before for after, before in zip(resized, self.original_size, strict=True))
            name = f"{name}/{resampler(name, shrinks=shrinks, by_trainer=True)}"
        middle = (resized[0] - self.bucket_reso[0]) // 2, (resized[1] - self.bucket_reso[1]) // 2
        crop = resized.crop if isinstance(resized, CutSize) else middle
        return Fingerprint(
            nbytes, mtime, "", self.vae, as_pair(self.bucket_reso), as_pair(resized), crop, name, dtype, "latents",
            self.flip, self.alpha_mask,
        )  # fmt: skip


def architecture_of(cache_suffix: str) -> Architecture | None:
    """The model family whose caches end in a strategy's `cache_suffix`; None for one that is not known."""
    return next((arch for arch in ARCHITECTURES.values() if arch.suffix == cache_suffix), None)


def architecture_read_by(strategy: Any) -> Architecture | None:
    """The model family of a caching strategy, with the kind of keys that its reader asks for first.

    The reader is asked, since families have had two kinds and forks have their own: it is given a file that has both.
    """
    arch = architecture_of(strategy.cache_suffix)
    if arch is None:
        return None
    bucket = arch.stride, arch.stride
    arrays: dict[str, npt.NDArray[Any]] = {}
    for sized in (False, True):
        keys = replace(arch, multi_resolution=sized, plain_until="0").key_suffix(bucket)
        arrays |= {f"latents{keys}": np.full(arch.shape(bucket), float(sized), np.float32)}
        arrays |= {f"original_size{keys}": np.array(bucket), f"crop_ltrb{keys}": np.array((0, 0, *bucket))}
    # one that this process left open for a moment cannot be removed on Windows
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, f"both{arch.suffix}")
        write_arrays(path, arrays, sync=False)
        latents = type(strategy).load_latents_from_disk(strategy, str(path), bucket)[0]
    sized = bool(latents.ravel()[0])
    own = sized == arch.multi_resolution
    return arch if own else replace(arch, multi_resolution=sized, plain_until=arch.plain_until or "0")


def ensure_npz_current(path: str | os.PathLike[str], item: CacheItem, arch: Architecture) -> tuple[list[Reason], bool]:
    """Why an item must be encoded, and none if it is in the npz as `arch` reads it; see `settle_npz`.

    Returns the reasons, and whether latents that lay elsewhere were put there. They are stale if the file is missing,
    broken or cut off, if they are of another shape, image size, crop, filter or VAE, of another image or an older state
    of it, or without the flipped ones or the mask that are asked for.
    """
    entry, unknown = item.to_compare()
    return settle_npz(Path(path), entry, arch, Path(item.image), ignoring=unknown)


def save_latents(
    path: str | os.PathLike[str], item: CacheItem, arch: Architecture | str, latents: Any, crop_ltrb: Iterable[float],
    flipped: Any = None, alpha_mask: Any = None, *, sync: bool = True,
) -> None:  # fmt: skip
    """Write one image's cache as sd-scripts does, whole or not at all, with its fingerprint.

    `latents`, `flipped` [C, (1,) h, w] and `alpha_mask` [H, W] are arrays or tensors. `sync` is as in `write_file`.

    Raises:
        LatentStoreError: not finite, of a shape that does not belong to the bucket, or the disk refuses.
    """
    family = ARCHITECTURES[arch] if isinstance(arch, str) else arch
    plain, *mirrored = finite_arrays(item, latents, flipped)
    left, top, right, bottom = (float(side) for side in crop_ltrb)
    mask = None if alpha_mask is None else as_array(alpha_mask)
    found = NpzLatents(plain, as_pair(item.original_size), (left, top, right, bottom), next(iter(mirrored), None), mask)
    name, bucket = Path(item.image).name, as_pair(item.bucket_reso)
    write_npz(Path(path), found, bucket, family, item.fingerprint(), source_name=name, sync=sync)


def as_array(values: Any) -> npt.NDArray[np.float32]:
    """float32 array of an array or tensor."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float32)


def finite_arrays(item: CacheItem, latents: Any, flipped: Any) -> list[npt.NDArray[np.float32]]:
    """Latents, and the flipped ones if there are any, as arrays; `LatentStoreError` for NaN and infinity."""
    parts = [as_array(part) for part in (latents, flipped) if part is not None]
    if not all(np.isfinite(part).all() for part in parts):
        raise LatentStoreError(f"{item.image}: its latent is not finite (NaN or infinity); it is not cached")
    return parts


Size = tuple[int, int]

Requested = dict[tuple[str, Size], tuple[bool, bool]]  # by file and bucket: (flipped, mask)


@dataclass
class Shared:
    """What the data sets of a run have in common while they cache, of which there is a row for each image.

    Attributes:
        requested: what each data set has needed so far.
        names: the npz files that are taken.
        captions: those that are taken, by usual file.
    """

    requested: list[tuple[ref[Any], Requested]] = field(default_factory=list)
    names: NpzNames | None = None
    captions: dict[str, list[Caption]] = field(default_factory=dict)


# by strategy, of which sd-scripts has one of each kind in a run
_shared: WeakKeyDictionary[Any, Shared] = WeakKeyDictionary()


def shared_by(strategy: Any) -> Shared:
    """What the data sets share that cache by a strategy."""
    return _shared.setdefault(strategy, Shared())


def forget_shared() -> None:
    """Let go of it, once all data sets have cached."""
    _shared.clear()


@dataclass
class CachingSession:
    """One caching call: what each cache path stands for, and why some are made again.

    Attributes:
        items: by cache path and bucket.
        sizes: bucket by cache path and the height and width of its latents.
        paths: cache path by image, and by size where that is not the image's own.
        shared: what data sets before this one need of an item that is theirs too, by cache path and bucket.
        reasons: why an image is encoded again.
    """

    dataset: Any
    strategy: Any
    arch: Architecture
    options: AdapterOptions
    vae: str
    items: dict[tuple[str, Size], CacheItem] = field(default_factory=dict)
    paths: dict[tuple[str, Size | None], str] = field(default_factory=dict)
    sizes: dict[tuple[str, tuple[int, ...]], Size] = field(default_factory=dict)
    shared: Requested = field(default_factory=dict)
    reasons: dict[str, list[Reason]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        infos = list(self.dataset.image_data.values())
        shared = shared_by(self.strategy)
        earlier = [requested for dataset, requested in shared.requested if dataset() is not None]
        mine: Requested = {}
        shared.requested.append((ref(self.dataset), mine))
        for info, path in zip(infos, self.paths_of(infos), strict=True):
            subset = self.dataset.image_to_subset[info.image_key]
            self.paths[str(info.absolute_path), _variant_size(info.absolute_path)] = path
            bucket = tuple(info.bucket_reso)
            self.sizes[path, self.arch.shape(bucket)[-2:]] = bucket
            self.items[path, bucket] = item = CacheItem(
                image=str(info.absolute_path),
                bucket_reso=info.bucket_reso,
                original_size=tuple(info.image_size),
                flip=bool(subset.flip_aug),
                alpha_mask=bool(subset.alpha_mask),
                resized_size=info.resized_size,
                vae=self.vae,
                interpolation=info.resize_interpolation,
                further=isinstance(info.absolute_path, SizedPath),
            )
            file = file_key(item.image), bucket
            mine[file] = item.flip, item.alpha_mask
            if known := [requested[file] for requested in earlier if file in requested]:
                self.shared[path, bucket] = any(flip for flip, _ in known), any(mask for _, mask in known)

    def paths_of(self, infos: list[Any]) -> list[str]:
        """The cache path of each image."""
        raise NotImplementedError

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Replacements for the strategy's methods, by name."""
        return {
            "get_latents_npz_path": self._path,
            "is_disk_cached_latents_expected": self._is_expected,
            "save_latents_to_disk": self._save,
        }

    def finish(self) -> None:
        """After sd-scripts' loop."""

    def keep(self) -> None:
        """Where that loop ended half-way, by Ctrl-C or an error: put on disk what is encoded."""

    def _path(self, absolute_path: str, image_size: Any) -> str:
        return self.paths[str(absolute_path), _variant_size(absolute_path)]

    def exists(self, path: str, item: CacheItem) -> bool:
        """Whether there is anything on disk, good or not."""
        raise NotImplementedError

    def why_missing(self, path: str, item: CacheItem) -> list[Reason]:
        """Why an item must be encoded; none if it is on disk as it should be."""
        raise NotImplementedError

    def save(
        self, path: str, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, sized: bool
    ) -> None:
        """Put an item on disk, where it has keys with its size or plain ones: as sd-scripts' own `save` is told."""
        raise NotImplementedError

    def stored(self, path: str, item: CacheItem) -> tuple[Any, Any]:
        """Flipped latents and mask of an item that is on disk."""
        raise NotImplementedError

    def _is_expected(self, bucket_reso: Any, path: str, flip_aug: bool, alpha_mask: bool) -> bool:
        item = self.items[path, tuple(bucket_reso)]
        if self.strategy.skip_disk_cache_validity_check and self.exists(path, item):
            return True
        reasons = self.why_missing(path, item)
        if any(reason.kind is not Stale.MISSING for reason in reasons):
            self.reasons[item.image] = reasons
        return not reasons

    def _save(
        self, path: str, latents: Any, original_size: Any, crop_ltrb: Any, flipped: Any = None, alpha_mask: Any = None,
        key_reso_suffix: str = "",
    ) -> None:  # fmt: skip
        size = self.sizes[path, tuple(latents.shape[-2:])]
        item = self.items[path, size]
        flip, mask = self.shared.get((path, size), (False, False))
        kept = replace(item, flip=flip and flipped is None, alpha_mask=mask and alpha_mask is None)
        if (kept.flip or kept.alpha_mask) and not self.why_missing(path, kept):
            stored_flipped, stored_mask = self.stored(path, item)
            flipped = stored_flipped if kept.flip else flipped
            alpha_mask = stored_mask if kept.alpha_mask else alpha_mask
            item = replace(item, flip=flipped is not None, alpha_mask=alpha_mask is not None)
        self.save(path, item, latents, crop_ltrb, flipped, alpha_mask, bool(key_reso_suffix))


def _variant_size(path: str) -> Size | None:
    return path.bucket if isinstance(path, SizedPath) else None


@contextmanager
def replaced(owner: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Methods of one of sd-scripts' objects replaced for a while."""
    patches = Patches()
    patches.apply([Replacement(owner, name, method) for name, method in methods.items()], lambda _: False)
    try:
        yield
    finally:
        patches.take_back()
