"""One image of a caching call, and what the datasets of a run share while they cache. Nothing imports sd-scripts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import Size, as_pair
from kohya_bucket.errors import LatentStoreError, why_not_written
from kohya_bucket.images.stamps import Stamp
from kohya_bucket.latents.fingerprint import GONE, Fingerprint, Stale
from kohya_bucket.latents.finite import all_finite
from kohya_bucket.latents.items import Caption
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.trainers.door.patching import Patches, Replacement
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES, Family
from kohya_bucket.trainers.sdscripts.npz.check import trainers_fingerprint
from kohya_bucket.trainers.sdscripts.npz.names import NpzNames
from kohya_bucket.trainers.sdscripts.npz.read_write import NpzLatents, write_arrays, write_npz


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
        path: of its npz; the image itself where latents are in a store.
        source: the image file before it was read, by `source_now`.
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
    path: str = ""
    source: Stamp = field(kw_only=True)

    def fingerprint(self) -> Fingerprint:
        """What the item's latents depend on."""
        return trainers_fingerprint(
            *self.source, self.vae, self.original_size, self.bucket_reso, self.resized_size, self.interpolation,
            flip=self.flip, mask=self.alpha_mask,
        )  # fmt: skip

    def to_compare(self) -> tuple[StoreEntry, tuple[Stale, ...]]:
        """The item as stored latents of it must be, and what of it cannot be compared, as `why_stale` ignores it.

        That is a VAE whose hash is not known yet, and an image that is gone: a cache outlives it.
        """
        unknown = (*(() if self.vae else (Stale.VAE,)), *((Stale.SOURCE,) if self.source == GONE else ()))
        crop = 0.0, 0.0, 0.0, 0.0
        return StoreEntry(Path(self.image).name, self.fingerprint(), as_pair(self.original_size), crop), unknown


def architecture_read_by(strategy: Any) -> Family:
    """The model family of a caching strategy, with the kind of keys that its reader asks for first.

    The reader itself decides, since families have had two kinds and forks have their own: it reads a file that has
    both. Of an unknown family, whose `channels` are 0 here, only this is supposed: a file has room for one size.
    """
    arch = next((arch for arch in ARCHITECTURES.values() if arch.suffix == strategy.cache_suffix), None)
    if arch is None:
        return Family("", "a family that is not known", 1, 0, suffix=strategy.cache_suffix, multi_resolution=False)
    bucket = arch.stride, arch.stride
    arrays: dict[str, npt.NDArray[Any]] = {}
    for sized in (False, True):
        keys = replace(arch, multi_resolution=sized, plain_until="0").key_suffix(bucket)
        arrays |= {f"latents{keys}": np.full(arch.shape(bucket), float(sized), np.float32)}
        arrays |= {f"original_size{keys}": np.array(bucket), f"crop_ltrb{keys}": np.array((0, 0, *bucket))}
    with temporary_folder() as folder:
        path = folder / f"both{arch.suffix}"
        write_arrays(path, arrays, sync=False)
        latents = type(strategy).load_latents_from_disk(strategy, str(path), bucket)[0]
    sized = bool(latents.ravel()[0])
    if sized == arch.multi_resolution:
        return arch
    return replace(arch, multi_resolution=sized, plain_until=arch.plain_until or "0")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for what is not in its place yet.

    Raises:
        LatentStoreError: there is no room in it.
    """
    try:
        # A file that this process left open for a moment cannot be removed on Windows.
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise LatentStoreError(f"{gettempdir()}: {why_not_written(error)}, or set TMPDIR to another folder") from error


def save_latents(
    path: str | os.PathLike[str], item: CacheItem, arch: Family, latents: Any, crop_ltrb: Iterable[float],
    flipped: Any = None, alpha_mask: Any = None, *, sync: bool = True,
) -> None:  # fmt: skip
    """Write one image's cache as sd-scripts does, whole or not at all, with its fingerprint.

    `latents`, `flipped` [C, (1,) h, w] and `alpha_mask` [H, W] are arrays or tensors. `sync` is as in `write_file`.

    Raises:
        LatentStoreError: a shape that does not belong to the bucket, or the disk refuses.
    """
    mirrored, mask = (None if part is None else as_array(part) for part in (flipped, alpha_mask))
    left, top, right, bottom = (float(side) for side in crop_ltrb)
    crop, name, bucket = (left, top, right, bottom), Path(item.image).name, as_pair(item.bucket_reso)
    made = NpzLatents(as_array(latents), as_pair(item.original_size), crop, mirrored, mask)
    write_npz(Path(path), made, bucket, arch, item.fingerprint(), source_name=name, sync=sync)


def as_array(values: Any) -> npt.NDArray[np.float32]:
    """float32 array of an array or tensor."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float32)


def refuse_not_finite(made: Iterable[Any], whose: str, what_to_do: str = "") -> None:
    """Raise `LatentStoreError` where one of the arrays or tensors that were made holds NaN or infinity."""
    if not all(all_finite(as_array(values)) for values in made if values is not None):
        raise LatentStoreError(f"{whose} is not finite (NaN or infinity); it is not cached{what_to_do}")


Requested = dict[tuple[str, Size], tuple[bool, bool]]  # by file and bucket: (flipped, mask)


@dataclass
class Shared:
    """What the datasets of a run share while they cache.

    Attributes:
        requested: what each dataset has needed so far.
        names: the npz files that are taken.
        captions: those that are taken, by usual file.
    """

    requested: list[tuple[ref[Any], Requested]] = field(default_factory=list)
    names: NpzNames | None = None
    captions: dict[str, list[Caption]] = field(default_factory=dict)


# by strategy, of which sd-scripts has one of each kind in a run
_shared: WeakKeyDictionary[Any, Shared] = WeakKeyDictionary()


def shared_by(strategy: Any) -> Shared:
    """What the datasets share that cache by a strategy."""
    return _shared.setdefault(strategy, Shared())


def forget_shared() -> None:
    """Let go of it, once all datasets have cached."""
    _shared.clear()


@contextmanager
def replaced(owner: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Methods of one of sd-scripts' objects, or functions of a module, replaced for a while."""
    patches = Patches()
    patches.apply([Replacement(owner, name, method) for name, method in methods.items()], lambda _: False)
    try:
        yield
    finally:
        patches.take_back()
