"""sd-scripts' own latent caches: one npz beside each image, for every model family it has.

Source: the `LatentsCachingStrategy` classes of kohya-ss/sd-scripts 0.9 to 0.10.1 (names, keys, shapes, types) and
the encoders they call (scaling). Files written here are, key by key and byte by byte, what sd-scripts writes, plus
one key it does not know. Its readers ask for keys by name and so ignore the addition, and its writer carries
unknown keys over, so the addition also says which latents it belongs to.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.atomic import write_file
from kohya_bucket.latents.fingerprint import Fingerprint

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "NpzLatents",
    "further_path",
    "npz_path",
    "read_npz",
    "size_from_name",
    "stored_fingerprint",
    "write_npz",
]

FINGERPRINT_KEY = "kohya_bucket_fingerprint"
_BROKEN = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


@dataclass(frozen=True)
class Architecture:
    """How sd-scripts caches one model family.

    Attributes:
        name: its name here and in `--arch`.
        suffix: end of the file's name.
        stride: pixels per latent in each side.
        channels: latent channels.
        multi_resolution: keys end in the latent's size, and one file holds several.
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        values: whether the file holds "raw" latents or ones already "scaled".
        per_channel: each channel has a scale of its own, which only the autoencoder knows. Early caches of such a
            family have an axis of length 1 after the channels, which is dropped when they are read.
    """

    name: str
    suffix: str
    stride: int
    channels: int
    multi_resolution: bool
    scale_factor: float = 1.0
    shift_factor: float = 0.0
    values: str = "raw"
    per_channel: bool = False

    def key_suffix(self, bucket_size: tuple[int, int]) -> str:
        """What keys end in for a bucket (width, height): "" or `_{latent height}x{latent width}`."""
        if not self.multi_resolution:
            return ""
        return f"_{bucket_size[1] // self.stride}x{bucket_size[0] // self.stride}"

    def shape(self, bucket_size: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the latents of a bucket: [C, h, w]."""
        return self.channels, bucket_size[1] // self.stride, bucket_size[0] // self.stride


# the Flux autoencoder scales in its own encode, SD3 and HunyuanImage scale when they train, Anima's normalizes
# each channel by a mean and a standard deviation
ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sd", "_sd.npz", 8, 4, False, scale_factor=0.18215),
        Architecture("sdxl", "_sdxl.npz", 8, 4, False, scale_factor=0.13025),
        Architecture("sd3", "_sd3.npz", 8, 16, True, scale_factor=1.5305, shift_factor=0.0609),
        Architecture("flux", "_flux.npz", 8, 16, True, scale_factor=0.3611, shift_factor=0.1159, values="scaled"),
        Architecture("lumina", "_lumina.npz", 8, 16, True, scale_factor=0.3611, shift_factor=0.1159, values="scaled"),
        Architecture("hunyuan_image", "_hi.npz", 32, 64, True, scale_factor=0.75289),
        Architecture("anima", "_anima.npz", 8, 16, True, values="scaled", per_channel=True),
    )
}


@dataclass(frozen=True)
class NpzLatents:
    """What one npz holds for one bucket: float32 arrays as they lie in the file, and the image's sizes."""

    latents: npt.NDArray[np.float32]
    original_size: tuple[int, int]
    crop_ltrb: tuple[float, float, float, float]
    flipped: npt.NDArray[np.float32] | None = None
    alpha_mask: npt.NDArray[np.float32] | None = None


def further_path(path: Path, bucket_size: tuple[int, int]) -> Path:
    """The file for a further size of an image, beside its usual npz.

    Its name does not end as sd-scripts' do, so that without this package it is nobody's.
    """
    width, height = bucket_size
    return path.with_name(f"{path.name.removesuffix('.npz')}_at_{width:04d}x{height:04d}.npz")


def npz_path(image: str | os.PathLike[str], size: tuple[int, int], arch: Architecture, *, shared: bool = False) -> Path:
    """The file sd-scripts looks for: `<stem>_<width>x<height><suffix>` beside the image, of the image's own size.

    With `shared`, another image of the folder has the same stem and size (`a.png`, `a.jpg`): sd-scripts lets
    both use one file; here this one's file is named by the whole file name. SD and SDXL prefer an old
    `<stem>.npz` where one exists; so does this function.
    """
    text = os.fspath(image)
    stem = os.path.splitext(text)[0]
    if not arch.multi_resolution and not shared and os.path.exists(stem + ".npz"):
        return Path(stem + ".npz")
    return Path(f"{text if shared else stem}_{size[0]:04d}x{size[1]:04d}{arch.suffix}")


def size_from_name(name: str, stem: str, arch: Architecture) -> tuple[int, int] | None:
    """Image size (width, height) in the cache's file name, if it is the cache of exactly this stem; else None."""
    match = re.fullmatch(re.escape(stem) + r"_(\d{4,})x(\d{4,})" + re.escape(arch.suffix), name)
    return (int(match[1]), int(match[2])) if match else None


def write_npz(
    path: Path,
    item: NpzLatents,
    bucket_size: tuple[int, int],
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
    suffix = arch.key_suffix(bucket_size)
    parts = ("latents", "latents_flipped", "alpha_mask", "original_size", "crop_ltrb", FINGERPRINT_KEY)
    replaced = {key + suffix for key in parts}
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        with np.load(path) as old:
            arrays = {key: old[key] for key in old.files if key not in replaced}
    except (FileNotFoundError, *_BROKEN):
        pass
    arrays[f"latents{suffix}"] = np.asarray(item.latents, dtype=np.float32)
    arrays[f"original_size{suffix}"] = np.array(item.original_size)
    arrays[f"crop_ltrb{suffix}"] = np.array(item.crop_ltrb)
    if item.flipped is not None:
        arrays[f"latents_flipped{suffix}"] = np.asarray(item.flipped, dtype=np.float32)
    if item.alpha_mask is not None:
        arrays[f"alpha_mask{suffix}"] = np.asarray(item.alpha_mask, dtype=np.float32)
    if fingerprint is not None:
        note = asdict(fingerprint) | {"source": source_name, "latents_crc32": _member_crc(arrays[f"latents{suffix}"])}
        arrays[FINGERPRINT_KEY + suffix] = np.frombuffer(json.dumps(note).encode("utf-8"), dtype=np.uint8)
    write_arrays(path, arrays, sync=sync)


def write_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]], *, sync: bool = True) -> None:
    """`np.savez`, whole or not at all. Raises `LatentStoreError` as `write_file` does."""
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    write_file(path, [out.getbuffer()], sync=sync)


def read_npz(path: Path, bucket_size: tuple[int, int], arch: Architecture) -> NpzLatents:
    """The latents of one bucket.

    Raises:
        LatentStoreError: missing, broken, or without this bucket's latents.
    """
    suffix = arch.key_suffix(bucket_size)
    try:
        with np.load(path) as file:
            if f"latents{suffix}" not in file:
                raise LatentStoreError(f"{path} has no latents for {bucket_size[0]}x{bucket_size[1]} ({arch.name})")

            width, height = (int(side) for side in file[f"original_size{suffix}"])
            left, top, right, bottom = (float(side) for side in file[f"crop_ltrb{suffix}"])
            found = NpzLatents(
                _flat(file[f"latents{suffix}"], arch), (width, height), (left, top, right, bottom),
                _flat(file.get(f"latents_flipped{suffix}"), arch), file.get(f"alpha_mask{suffix}"),
            )  # fmt: skip
    except LatentStoreError:
        raise
    except FileNotFoundError as error:
        raise LatentStoreError(f"{path} does not exist") from error
    except _BROKEN as error:
        raise LatentStoreError(f"{path} is broken ({error}): delete it, it will be made again") from error
    if found.latents.shape != arch.shape(bucket_size):
        raise LatentStoreError(
            f"{path} holds latents of shape {list(found.latents.shape)}, but {arch.name} at "
            f"{bucket_size[0]}x{bucket_size[1]} needs {list(arch.shape(bucket_size))}"
        )
    return found


def buckets_in(path: Path, arch: Architecture) -> list[tuple[int, int]]:
    """Buckets (width, height) whose latents an npz holds. Raises `LatentStoreError` if it is broken."""
    try:
        with np.load(path) as file:
            shapes = [file[key].shape for key in file.files if re.fullmatch(r"latents(_\d+x\d+)?", key)]
    except _BROKEN as error:
        raise LatentStoreError(f"{path} is broken ({error})") from error
    return [(shape[-1] * arch.stride, shape[-2] * arch.stride) for shape in shapes]


def stored_fingerprint(path: Path, bucket_size: tuple[int, int], arch: Architecture) -> tuple[Fingerprint, str] | None:
    """The fingerprint in an npz and the file name of its image.

    None where there is none, or where sd-scripts has rewritten the latents since: then nothing is known.
    Reads the notes only, not the latents.
    """
    suffix = arch.key_suffix(bucket_size)
    try:
        with zipfile.ZipFile(path) as archive:
            name = f"{FINGERPRINT_KEY}{suffix}.npy"
            if name not in archive.namelist():
                return None
            note = json.loads(np.load(io.BytesIO(archive.read(name))).tobytes())
            if note.pop("latents_crc32") != archive.getinfo(f"latents{suffix}.npy").CRC:
                return None
        source = note.pop("source")
        pairs = {key: tuple(note[key]) for key in ("bucket_size", "resized_size", "crop")}
        return Fingerprint(**(note | pairs)), source
    except (*_BROKEN, TypeError):
        return None


def collisions(images: Sequence[str], sizes: Sequence[tuple[int, int]]) -> set[int]:
    """Positions of images that would share a cache file with an earlier one (by name): same stem, same size."""
    taken: dict[tuple[str, int, int], int] = {}
    shared = set()
    for i in sorted(range(len(images)), key=lambda i: images[i]):
        key = (os.path.splitext(images[i])[0], int(sizes[i][0]), int(sizes[i][1]))
        if taken.setdefault(key, i) != i:
            shared.add(i)
    return shared


def _flat(latents: Any, arch: Architecture) -> Any:
    """Without the axis of length 1 that early caches of Anima have."""
    old = arch.per_channel and latents is not None and latents.ndim == 4 and latents.shape[1] == 1
    return latents[:, 0] if old else latents


def _member_crc(array: npt.NDArray[Any]) -> int:
    """CRC-32 of the array as an npz member, which the zip directory repeats."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asanyarray(array), allow_pickle=False)
    return zlib.crc32(out.getbuffer())
