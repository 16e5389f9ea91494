"""sd-scripts' own latent caches: one npz beside each image, for every model family it has.

Source: the `LatentsCachingStrategy` classes of kohya-ss/sd-scripts 0.9 to 0.11. Files written here are, key by key
and byte by byte, what sd-scripts writes, plus one key it does not know (`npz_note`).

Keys end in the latents' size, as `latents_64x48`, and one file holds several. SD and SDXL have such keys since 0.10.2;
before, theirs had no size (plain keys), and a file held one resolution. Versions since ask for the keys with the size
first, and if there are none take the plain ones, whatever their size; versions before know the plain ones only. So the
same arrays are moved from one kind of keys to the other where the reader at hand needs it, and a file never holds the
latents of one size twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale
from kohya_bucket.latents.npz.note import NOTE, note_of
from kohya_bucket.latents.npz.opened import BROKEN, BrokenNpzError, OpenNpz, read_arrays, write_arrays

__all__ = ["NpzLatents", "bring_over", "read_keys", "read_npz", "sizes_in", "write_npz"]

Size = tuple[int, int]

_PARTS = ("latents", "original_size", "crop_ltrb", "latents_flipped", "alpha_mask", NOTE)  # in sd-scripts' order


@dataclass(frozen=True)
class NpzLatents:
    """What one npz holds for one bucket: float32 arrays as they lie in the file, and the image's sizes."""

    latents: npt.NDArray[np.float32]
    original_size: Size
    crop_ltrb: tuple[float, float, float, float]
    flipped: npt.NDArray[np.float32] | None = None
    alpha_mask: npt.NDArray[np.float32] | None = None


def write_npz(
    path: Path,
    item: NpzLatents,
    bucket_size: Size,
    arch: Architecture,
    fingerprint: Fingerprint | None = None,
    *,
    source_name: str = "",
    sync: bool = True,
) -> None:
    """Write one image's latents as sd-scripts does, but whole or not at all.

    A readable file with other resolutions, or with arrays that are no latents, keeps them; an unreadable one is
    replaced. (sd-scripts takes an `IMAGE.npz` for an old cache, whatever is in it.)

    Raises:
        LatentStoreError: the latents' shape does not belong to the bucket, or the file cannot be written.
    """
    if item.latents.shape != arch.shape(bucket_size):
        raise LatentStoreError(
            f"{path.name}: latents of shape {list(item.latents.shape)} do not belong to {arch.name} at "
            f"{bucket_size[0]}x{bucket_size[1]}, which has {list(arch.shape(bucket_size))}"
        )
    parts: dict[str, npt.NDArray[Any]] = {
        "latents": np.asarray(item.latents, dtype=np.float32),
        "original_size": np.array(item.original_size),
        "crop_ltrb": np.array(item.crop_ltrb),
    }
    if item.flipped is not None:
        parts["latents_flipped"] = np.asarray(item.flipped, dtype=np.float32)
    if item.alpha_mask is not None:
        parts["alpha_mask"] = np.asarray(item.alpha_mask, dtype=np.float32)
    if fingerprint is not None:
        parts[NOTE] = note_of(fingerprint, source_name, parts["latents"])
    _put(path, parts, bucket_size, arch, sync=sync)


def bring_over(
    source: Path, keys: str, path: Path, bucket_size: Size, arch: Architecture, *, sync: bool = True
) -> Reason | None:
    """Put the latents of `source` whose keys end in `keys` where a reader of this family finds them in `path`.

    Nothing is encoded, and every array stays what it is. In one file they are moved; another `source` stays as it is.
    Returns what is wrong if they cannot be read.

    Raises:
        LatentStoreError: the file cannot be written.
    """
    try:
        with OpenNpz(source) as file:
            parts = {part: file.array(part + keys) for part in _PARTS if part + keys in file.names}
    except BROKEN as error:
        return Reason(Stale.BROKEN, error or type(error).__name__)
    if "latents" in parts:  # or else another process was faster
        _put(path, parts, bucket_size, arch, sync=sync)
    return None


def _put(
    path: Path, parts: dict[str, npt.NDArray[Any]], bucket_size: Size, arch: Architecture, *, sync: bool
) -> None:  # fmt: skip
    """Write the arrays of one size in place of those that the file has of it, whatever their keys.

    Plain keys have room for one size: what they hold of another gets keys with its size.
    """
    arrays = read_arrays(path)
    plain = arrays["latents"].shape if "latents" in arrays else ()
    for keys in arch.key_suffixes(bucket_size):
        if keys or plain == arch.shape(bucket_size):
            _take(arrays, keys)
    own = arch.key_suffix(bucket_size)
    if not own:
        displaced = _take(arrays, "")
        keys = f"_{plain[-2]}x{plain[-1]}" if len(plain) == 3 and plain[0] == arch.channels else ""
        if keys and "latents" in displaced and f"latents{keys}" not in arrays:
            arrays |= {part + keys: array for part, array in displaced.items()}
    arrays |= {part + own: parts[part] for part in _PARTS if part in parts}
    write_arrays(path, arrays, sync=sync)


def _take(arrays: dict[str, npt.NDArray[Any]], keys: str) -> dict[str, npt.NDArray[Any]]:
    return {part: arrays.pop(part + keys) for part in _PARTS if part + keys in arrays}


def read_npz(path: Path, bucket_size: Size, arch: Architecture) -> NpzLatents:
    """The latents of one bucket, whichever kind of keys they have; first those that this family's readers ask for.

    Raises:
        LatentStoreError: missing, broken, or without this bucket's latents.
    """
    other = None
    try:
        with OpenNpz(path) as file:
            for keys in arch.key_suffixes(bucket_size):
                if f"latents{keys}" in file.names:
                    found = read_keys(file, keys, arch)
                    if found.latents.shape == arch.shape(bucket_size):
                        return found
                    other = other or found.latents.shape
    except FileNotFoundError as error:
        raise LatentStoreError(f"{path} does not exist") from error
    except BROKEN as error:
        raise LatentStoreError(f"{path} is broken ({error}): delete it, it will be made again") from error
    if other is None:
        raise LatentStoreError(f"{path} has no latents for {bucket_size[0]}x{bucket_size[1]} ({arch.name})")
    raise LatentStoreError(
        f"{path} holds latents of shape {list(other)}, but {arch.name} at "
        f"{bucket_size[0]}x{bucket_size[1]} needs {list(arch.shape(bucket_size))}"
    )


def read_keys(file: OpenNpz, keys: str, arch: Architecture) -> NpzLatents:
    """The latents whose keys end in `keys`. Raises one of `BROKEN`."""
    width, height = (int(side) for side in file.numbers(f"original_size{keys}", 2))
    if not (0 < width < 1 << 31 and 0 < height < 1 << 31):
        raise BrokenNpzError(f"original_size{keys} holds {width}x{height}")
    left, top, right, bottom = (float(side) for side in file.numbers(f"crop_ltrb{keys}", 4))
    shape = file.shape(f"latents{keys}")
    flipped = file.floats(f"latents_flipped{keys}", shape) if f"latents_flipped{keys}" in file.names else None
    mask = None
    if f"alpha_mask{keys}" in file.names:
        pixels = file.shape(f"alpha_mask{keys}")
        if len(pixels) != 2 or tuple(side // arch.stride for side in pixels) != shape[-2:]:
            raise BrokenNpzError(f"alpha_mask{keys} has shape {list(pixels)}, the latents have {list(shape)}")
        mask = file.floats(f"alpha_mask{keys}", pixels)
    return NpzLatents(
        _flat(file.floats(f"latents{keys}", shape), arch), (width, height), (left, top, right, bottom),
        _flat(flipped, arch), mask,
    )  # fmt: skip


def sizes_in(file: OpenNpz, arch: Architecture) -> list[tuple[Size, str]]:
    """Bucket (width, height) and end of the keys of all latents of this family in a file. Raises one of `BROKEN`.

    A bucket may come twice: another program may have added keys of the other kind.
    """
    out = []
    for name in file.names:
        if re.fullmatch(r"latents(_\d+x\d+)?", name):
            shape, keys = file.shape(name), name.removeprefix("latents")
            if arch.per_channel and len(shape) == 4 and shape[1] == 1:  # see `_flat`
                shape = shape[:1] + shape[2:]
            if len(shape) == 3 and shape[0] == arch.channels:
                bucket = shape[2] * arch.stride, shape[1] * arch.stride
                if keys in arch.key_suffixes(bucket):
                    out.append((bucket, keys))
    return out


def _flat(latents: Any, arch: Architecture) -> Any:
    """Without the axis of length 1 that early caches of Anima have."""
    old = arch.per_channel and latents is not None and latents.ndim == 4 and latents.shape[1] == 1
    return latents[:, 0] if old else latents
