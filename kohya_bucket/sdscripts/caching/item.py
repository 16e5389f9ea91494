"""One image as sd-scripts wants its latents cached, and the npz that it has: whole, and saying what it was made from.

Nothing here imports sd-scripts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.geometry import cover_resize
from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.images.resize import choose_interpolation, resampler
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale, source_identity
from kohya_bucket.latents.npz.check import settle_npz
from kohya_bucket.latents.npz.read_write import NpzLatents, write_arrays, write_npz
from kohya_bucket.latents.store.entries import StoreEntry

__all__ = [
    "CacheItem",
    "architecture_of",
    "architecture_read_by",
    "as_array",
    "save_latents",
    "settle_latents",
]


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
            print_ = self.fingerprint(dtype)
        except OSError:
            print_, unknown = self._fingerprint(dtype, -1, -1), (*unknown, Stale.SOURCE)
        entry = StoreEntry(Path(self.image).name, print_, as_pair(self.original_size), (0.0, 0.0, 0.0, 0.0))
        return entry, unknown

    def _fingerprint(self, dtype: str, nbytes: int, mtime: int) -> Fingerprint:
        resized = self.resized_size or _cover(self.original_size, self.bucket_reso)
        name = "none"
        if tuple(resized) != tuple(self.original_size):
            name = choose_interpolation(self.original_size, resized, self.interpolation)
            shrinks = all(after <= before for after, before in zip(resized, self.original_size, strict=True))
            name = f"{name}/{resampler(name, shrinks=shrinks, by_trainer=True)}"
        crop = (resized[0] - self.bucket_reso[0]) // 2, (resized[1] - self.bucket_reso[1]) // 2
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
    return (
        arch
        if sized == arch.multi_resolution
        else replace(arch, multi_resolution=sized, plain_until=arch.plain_until or "0")
    )


def settle_latents(path: str | os.PathLike[str], item: CacheItem, arch: Architecture) -> tuple[list[Reason], bool]:
    """Why an item must be encoded, and none if it is in the npz as `arch` reads it; see `settle_npz`.

    Returns the reasons, and whether latents that lay elsewhere were put there. They are stale if the file is missing,
    broken or cut off, if they are of another shape, image size, crop, filter or VAE, of another image or an older state
    of it, or without the flipped ones or the mask that are asked for.
    """
    entry, unknown = item.to_compare()
    return settle_npz(Path(path), entry, arch, Path(item.image), ignoring=unknown)


def save_latents(
    path: str | os.PathLike[str],
    item: CacheItem,
    arch: Architecture | str,
    latents: Any,
    crop_ltrb: Iterable[float],
    flipped: Any = None,
    alpha_mask: Any = None,
    *,
    sync: bool = True,
) -> None:
    """Write one image's cache as sd-scripts does, whole or not at all, with its fingerprint.

    `latents`, `flipped` [C, (1,) h, w] and `alpha_mask` [H, W] are arrays or tensors. `sync` is as in `write_file`.

    Raises:
        LatentStoreError: not finite, of a shape that does not belong to the bucket, or the disk refuses.
    """
    family = ARCHITECTURES[arch] if isinstance(arch, str) else arch
    plain, mirrored = as_array(latents), None if flipped is None else as_array(flipped)
    for part in (plain, mirrored):
        if part is not None and not np.isfinite(part).all():
            raise LatentStoreError(f"{item.image}: its latent is not finite (NaN or infinity); it is not cached")
    left, top, right, bottom = (float(side) for side in crop_ltrb)
    found = NpzLatents(
        plain, as_pair(item.original_size), (left, top, right, bottom), mirrored,
        None if alpha_mask is None else as_array(alpha_mask),
    )  # fmt: skip
    print_ = item.fingerprint()
    write_npz(
        Path(path), found, as_pair(item.bucket_reso), family, print_, source_name=Path(item.image).name, sync=sync
    )  # fmt: skip


def _cover(size: tuple[int, int], bucket: tuple[int, int]) -> tuple[int, int]:
    values = (size[0], size[1], size[0] / size[1], bucket[0], bucket[1], bucket[0] / bucket[1])
    width, height = cover_resize(*(np.array([value], dtype=np.float64) for value in values))
    return int(width[0]), int(height[0])


def as_array(values: Any) -> npt.NDArray[np.float32]:
    """float32 array of an array or tensor."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float32)
