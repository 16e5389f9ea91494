"""What the adapter puts behind sd-scripts' caching strategies: npz that are whole, and checked before they count.

Nothing here imports sd-scripts. Where the fingerprint lives: in one more array inside each npz. sd-scripts' readers
ask for arrays by name and never see it; its writer loads a file and writes all arrays back, so the fingerprint
carries the checksum of the latents that it belongs to.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.geometry import cover_resize
from kohya_bucket.buckets.types import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.images.pixels import choose_interpolation, resampler
from kohya_bucket.latents.entries import Entry
from kohya_bucket.latents.fingerprint import Fingerprint, source_identity
from kohya_bucket.latents.npz import (
    ARCHITECTURES,
    Architecture,
    NpzLatents,
    stored_fingerprint,
    write_arrays,
    write_npz,
)
from kohya_bucket.latents.npz_check import why_npz_bad, why_npz_stale

__all__ = [
    "CacheItem",
    "architecture_of",
    "as_array",
    "caption_mark",
    "check_npz",
    "check_text_npz",
    "save_latents",
    "savez",
    "source_fingerprint",
    "write_npz_atomic",
]

CAPTION_KEY = "kohya_bucket_caption"
ENCODERS_KEY = "kohya_bucket_text_encoders"
DROPOUT_KEY = "caption_dropout_rate"  # sd-scripts' own, for some model families


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

    def fingerprint(self, dtype: str = "float32", *, of_gone: Fingerprint | None = None) -> Fingerprint:
        """What the item's latents depend on, with the image file as it is now.

        Args:
            dtype: storage type.
            of_gone: stored fingerprint, whose file counts where the image is not there any more: there is nothing to
                compare with, nor to encode. Without it, that is an `OSError`.
        """
        resized = self.resized_size or _cover(self.original_size, self.bucket_reso)
        name = "none"
        if tuple(resized) != tuple(self.original_size):
            name = choose_interpolation(self.original_size, resized, self.interpolation)
            shrinks = all(after <= before for after, before in zip(resized, self.original_size, strict=True))
            name = f"{name}/{resampler(name, shrinks=shrinks)}"
        crop = (resized[0] - self.bucket_reso[0]) // 2, (resized[1] - self.bucket_reso[1]) // 2
        try:
            nbytes, mtime, _ = source_identity(self.image)
        except OSError:
            if of_gone is None:
                raise
            nbytes, mtime = of_gone.source_bytes, of_gone.source_mtime_ns
        return Fingerprint(
            nbytes, mtime, "", self.vae, as_pair(self.bucket_reso), as_pair(resized), crop, name, dtype, "latents",
            self.flip, self.alpha_mask,
        )  # fmt: skip


def architecture_of(cache_suffix: str) -> Architecture | None:
    """The model family whose caches end in a strategy's `cache_suffix`; None for one that is not known."""
    return next((arch for arch in ARCHITECTURES.values() if arch.suffix == cache_suffix), None)


def source_fingerprint(path: str | os.PathLike[str], *, content: bool = False) -> tuple[int, int, str]:
    """Length, modification time in ns and, with `content`, hash of an image file."""
    return source_identity(path, content=content)


def check_npz(
    path: str | os.PathLike[str],
    bucket_reso: tuple[int, int],
    original_size: tuple[int, int],
    flip: bool,
    alpha_mask: bool,
    arch: Architecture | str,
    *,
    item: CacheItem | None = None,
    content: bool = False,
) -> str | None:
    """Why a latent cache cannot be trained from, or None if it can.

    Missing, broken, cut off, of another shape or image size, without the flipped latents or the mask that are
    asked for. With `item`, also: made from another image, an older state of it, another VAE, crop or filter.
    With `content`, every checksum in the file is read. A cache outlives its image: what cannot be compared with an
    image that is gone is believed.
    """
    family = ARCHITECTURES[arch] if isinstance(arch, str) else arch
    bad = why_npz_bad(
        Path(path), as_pair(bucket_reso), family, original_size=as_pair(original_size), flip=flip, mask=alpha_mask,
        content=content,
    )  # fmt: skip
    if bad is not None or item is None:
        return bad
    try:
        print_ = item.fingerprint()
    except OSError:
        known = stored_fingerprint(Path(path), as_pair(bucket_reso), family)
        if known is None:
            return None
        print_ = item.fingerprint(of_gone=known[0])
    entry = Entry(Path(item.image).name, print_, as_pair(original_size), (0.0, 0.0, 0.0, 0.0))
    unknown = () if item.vae else ("vae",)
    return "; ".join(why_npz_stale(Path(path), entry, family, Path(item.image), ignoring=unknown)) or None


def save_latents(
    path: str | os.PathLike[str],
    item: CacheItem,
    arch: Architecture | str,
    latents: Any,
    crop_ltrb: Iterable[float],
    flipped: Any = None,
    alpha_mask: Any = None,
) -> None:
    """Write one image's cache as sd-scripts does, whole or not at all, with its fingerprint.

    `latents`, `flipped` [C, (1,) h, w] and `alpha_mask` [H, W] are arrays or tensors.

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
        Path(path), found, as_pair(item.bucket_reso), family, print_, source_name=Path(item.image).name
    )  # fmt: skip


def write_npz_atomic(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Write any npz whole or not at all. Raises `LatentStoreError` if the disk refuses."""
    write_arrays(Path(path), {name: np.asarray(array) for name, array in arrays.items()})


def savez(file: Any, *args: Any, **arrays: Any) -> None:
    """In place of `np.savez` with a path: the same file, whole or not at all. Other targets go to numpy."""
    if args or not isinstance(file, (str, os.PathLike)):
        np.savez(file, *args, **arrays)
        return
    path = os.fspath(file)
    write_npz_atomic(path if path.endswith(".npz") else path + ".npz", arrays)


def caption_mark(caption: str | Iterable[str]) -> npt.NDArray[np.uint8]:
    """The array to save as `CAPTION_KEY` beside text-encoder outputs: which caption they are of."""
    text = caption if isinstance(caption, str) else "\x1e".join(caption)
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)


def check_text_npz(
    path: str | os.PathLike[str],
    required: Iterable[str],
    caption: str | Iterable[str] | None = None,
    dropout: float | None = None,
    encoders: str = "",
) -> str | None:
    """Why cached text-encoder outputs cannot be used, or None: every byte is read, so what is broken shows.

    With `caption`, outputs of another caption are refused, with `dropout` those that are saved with another
    `caption_dropout_rate`, which is trained with, and with `encoders` (their hash) those of other text encoders; files
    that do not say theirs are believed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = set(archive.namelist())
            missing = [name for name in required if f"{name}.npy" not in members]
            if missing:
                return f"it has no {missing[0]}"
            bad = archive.testzip()
            if bad is not None:
                return f"the checksum of {bad.removesuffix('.npy')} is wrong"
            notes = {
                name: np.load(io.BytesIO(archive.read(f"{name}.npy")))
                for name in (CAPTION_KEY, ENCODERS_KEY, DROPOUT_KEY)
                if f"{name}.npy" in members
            }
        marked = None if caption is None else caption_mark(caption).tobytes()
        if marked is not None and CAPTION_KEY in notes and notes[CAPTION_KEY].tobytes() != marked:
            return "the caption changed"
        if encoders and ENCODERS_KEY in notes and notes[ENCODERS_KEY].tobytes() != encoders.encode():
            return "the text encoders changed"
        if dropout is not None and DROPOUT_KEY in notes:
            rate = float(notes[DROPOUT_KEY])
            if rate != float(np.float32(dropout)):
                return f"the caption_dropout_rate changed ({rate:g} -> {dropout:g})"
    except FileNotFoundError:
        return "it does not exist"
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        return f"it is broken ({error or type(error).__name__})"
    return None


def _cover(size: tuple[int, int], bucket: tuple[int, int]) -> tuple[int, int]:
    values = (size[0], size[1], size[0] / size[1], bucket[0], bucket[1], bucket[0] / bucket[1])
    width, height = cover_resize(*(np.array([value], dtype=np.float64) for value in values))
    return int(width[0]), int(height[0])


def as_array(values: Any) -> npt.NDArray[np.float32]:
    """float32 array of an array or tensor."""
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float32)
