"""Whether an npz can be trained from: whole, of the right shape, and made from the image as it is now."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from kohya_bucket.latents.entries import Entry
from kohya_bucket.latents.fingerprint import source_identity, why_stale
from kohya_bucket.latents.npz import Architecture, stored_fingerprint

__all__ = ["why_npz_bad", "why_npz_stale"]

_BROKEN = (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError)


def why_npz_bad(
    path: Path,
    bucket_size: tuple[int, int],
    arch: Architecture,
    *,
    original_size: tuple[int, int] | None = None,
    flip: bool = False,
    mask: bool = False,
    content: bool = False,
) -> str | None:
    """What keeps an npz from being used for this bucket, or None. Sources are not looked at here.

    Headers only are read (shapes and the small arrays); with `content`, every byte's checksum too.
    """
    suffix = arch.key_suffix(bucket_size)
    shape = arch.shape(bucket_size)
    wanted: dict[str, tuple[int, ...]] = {"latents": shape, "original_size": (2,), "crop_ltrb": (4,)}
    wanted |= {"latents_flipped": shape} if flip else {}
    wanted |= {"alpha_mask": bucket_size[::-1]} if mask else {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = set(archive.namelist())
            for name, expected in wanted.items():
                member = f"{name}{suffix}.npy"
                if member not in members:
                    return f"it has no {name}{suffix}"
                with archive.open(member) as file:
                    version = np.lib.format.read_magic(file)
                    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                    found = (read or np.lib.format.read_array_header_2_0)(file)[0]
                if found != expected:
                    return f"its {name} has shape {list(found)}, not {list(expected)}"
                info = archive.getinfo(member)
                if info.compress_type == zipfile.ZIP_STORED and info.file_size > info.compress_size:
                    return f"its {name} is cut off"
            if original_size is not None:
                with np.load(path) as arrays:
                    stored = tuple(int(side) for side in arrays[f"original_size{suffix}"])
                if stored != tuple(original_size):
                    return f"it is of an image of {stored[0]}x{stored[1]}, not {original_size[0]}x{original_size[1]}"
            bad = archive.testzip() if content else None
            if bad is not None:
                return f"the checksum of {bad.removesuffix('.npy')} is wrong"
    except FileNotFoundError:
        return "it does not exist"
    except _BROKEN as error:
        return f"it is broken ({error or type(error).__name__})"
    return None


def why_npz_stale(
    path: Path, wanted: Entry, arch: Architecture, image: Path, *, ignoring: Collection[str] = ()
) -> list[str]:
    """Reasons why the file must be made again for `wanted`; none if it serves.

    A file without a fingerprint was made by sd-scripts itself: it serves if it is whole and not older than the
    image. `ignoring` is as in `why_stale`; the type of the numbers never counts, npz hold float32.
    """
    print_ = wanted.fingerprint
    bad = why_npz_bad(
        path, print_.bucket_size, arch, original_size=wanted.original_size, flip=print_.flip, mask=print_.mask
    )
    if bad is not None:
        return ["not encoded yet" if bad == "it does not exist" else bad]
    known = stored_fingerprint(path, print_.bucket_size, arch)
    if known is None:
        try:
            older = path.stat().st_mtime_ns < source_identity(image)[1]
        except OSError:
            return ["the image is gone"]
        return ["the image is newer than its cache, which does not say what it was made from"] if older else []
    fingerprint, source_name = known
    reasons = why_stale(fingerprint, print_, image, ignoring=("dtype", *ignoring))
    if source_name and source_name != image.name:
        reasons.append(f"it was made from {source_name}")
    return reasons
