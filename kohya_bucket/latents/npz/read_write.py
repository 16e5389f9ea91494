"""sd-scripts' own latent caches: one npz beside each image, for every model family it has.

Source: the `LatentsCachingStrategy` classes of kohya-ss/sd-scripts 0.9 to 0.11. Files are byte by byte what sd-scripts
writes, plus one key (`NOTE`) that says what the latents were made from. sd-scripts' readers ignore it and its writer
carries it over, so it also says which latents it belongs to. Arrays are moved between keys with a size and plain ones
as the reader at hand needs them: docs/latent-format.md says which version looks where.

Anybody may have written a file: nothing is unpacked before what it states of itself was compared with its length.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.files import write_file
from kohya_bucket.inputs import open_input
from kohya_bucket.latents.architectures import Architecture, LatentSpace
from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale, why_different
from kohya_bucket.latents.items import Caption, Encoding, caption_bytes, content_hash


class BrokenNpzError(LatentStoreError):
    """A file that is no npz, or one that is damaged, or states what cannot be."""


# what a missing, damaged or foreign file may raise
BROKEN = (OSError, BrokenNpzError)

_MOST = 1 << 32  # bytes, unpacked
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class OpenNpz:
    """A file as `np.savez` writes it, to be used in a `with`. Every use may raise one of `BROKEN`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with as_damage("no npz", error=BrokenNpzError):
            self._file = open_input(path)
            try:
                self._archive = zipfile.ZipFile(self._file)
            except BaseException:
                self._file.close()
                raise
        self._members = {member.filename: member for member in self._archive.infolist()}
        self.names = [name.removesuffix(".npy") for name in self._members if name.endswith(".npy")]

    def __enter__(self) -> OpenNpz:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, from its header."""
        with self._member(f"{name}.npy") as (file, _):
            return _header(file)[0]

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array, whose checksum is right."""
        with self._member(f"{name}.npy") as (file, nbytes):
            shape, in_columns, dtype = _header(file)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize != nbytes - file.tell():
                raise ValueError(f"{name} has {nbytes} bytes, which is not an array of shape {shape} and type {dtype}")
            data = bytearray(file.read())
            array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, order="F" if in_columns else "C")
            return array

    def numbers(self, name: str, count: int) -> list[float]:
        """The values of an array of `count` finite numbers."""
        if self.shape(name) != (count,):
            raise BrokenNpzError(f"{name} is not a row of {count} numbers")
        array = self.array(name)
        if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise BrokenNpzError(f"{name} holds {array.tolist()}")
        return list(array.tolist())

    def floats(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """An array of floating-point numbers of this shape."""
        if self.shape(name) != shape:  # before it is unpacked: it may claim to be large
            raise BrokenNpzError(f"{name} has shape {list(self.shape(name))}, not {list(shape)}")
        array = self.array(name)
        if array.dtype.kind != "f":
            raise BrokenNpzError(f"{name} holds {array.dtype}, not floating-point numbers")
        return array

    def crc(self, name: str) -> int:
        """Checksum that the directory states, see `member_crc`."""
        return self._members[f"{name}.npy"].CRC

    def is_cut_off(self, name: str) -> bool:
        member = self._members[f"{name}.npy"]
        return member.compress_type == zipfile.ZIP_STORED and member.file_size > member.compress_size

    def damaged(self) -> str | None:
        """Name of the first array whose bytes have not the checksum stated; all are read."""
        for name in self._members:
            try:
                with self._member(name) as (file, _):
                    while file.read(1 << 20):
                        pass
            except BROKEN:
                return name.removesuffix(".npy")
        return None

    @contextmanager
    def _member(self, name: str) -> Iterator[tuple[Any, int]]:
        with as_damage(name, error=BrokenNpzError):
            member = self._members[name]
            # bzip2 and lzma unpack without a limit, and numpy writes neither
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("it is encrypted, or packed in a way that no npz is")
            if member.file_size > _MOST:
                raise ValueError(f"it claims {member.file_size} bytes")
            with self._archive.open(member) as file:
                yield file, member.file_size


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    shape, in_columns, dtype = _READERS[np.lib.format.read_magic(file)](file)
    if not all(type(side) is int and side >= 0 for side in shape) or not dtype.itemsize:
        raise ValueError(f"no array has shape {shape} and type {dtype}")
    return tuple(shape), in_columns, dtype


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that can be read: none of one that is missing or no npz."""
    arrays = {}
    with suppress(*BROKEN), OpenNpz(path) as file:
        for name in file.names:
            with suppress(*BROKEN):
                arrays[name] = file.array(name)
    return arrays


def write_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]], *, sync: bool = True) -> None:
    """`np.savez`, whole or not at all. Raises `LatentStoreError` as `write_file` does."""
    write_file(path, lambda out: np.savez(out, **arrays), sync=sync)  # type: ignore[arg-type]


def member_crc(array: npt.NDArray[Any]) -> int:
    """CRC-32 of an array as it lies in an npz."""
    array = np.asarray(array)
    out = io.BytesIO()
    if not array.flags.c_contiguous:
        np.lib.format.write_array(out, array, allow_pickle=False)
        return zlib.crc32(out.getbuffer())
    np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(out.getbuffer()))


NOTE = "kohya_bucket_fingerprint"
_LONGEST_NOTE = 1 << 16  # bytes


def note_of(fingerprint: Fingerprint, source_name: str, latents: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The array to write beside `latents`: what they were made from, and the file name of the image."""
    note = vars(fingerprint) | {"source": source_name, "latents_crc32": member_crc(latents)}
    return np.frombuffer(json.dumps(note).encode("utf-8"), dtype=np.uint8)


def read_note(file: OpenNpz, key_suffix: str) -> tuple[Fingerprint, str] | None:
    """Fingerprint and file name of the image of the latents whose keys end so.

    None where there is none, or where sd-scripts has rewritten the latents since: then nothing is known.
    """
    name = f"{NOTE}{key_suffix}"
    if name not in file.names:
        return None
    with suppress(BrokenNpzError), as_damage(name, error=BrokenNpzError):
        shape = file.shape(name)
        note = json.loads(file.array(name).tobytes()) if len(shape) == 1 and shape[0] <= _LONGEST_NOTE else {}
        if note.pop("latents_crc32") == file.crc(f"latents{key_suffix}"):
            source = note.pop("source")
            if isinstance(source, str):
                return Fingerprint.of(note), source
    return None


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
    floats = {"latents": item.latents, "latents_flipped": item.flipped, "alpha_mask": item.alpha_mask}
    parts: dict[str, npt.NDArray[Any]] = {
        name: np.asarray(array, dtype=np.float32) for name, array in floats.items() if array is not None
    }
    parts |= {"original_size": np.array(item.original_size), "crop_ltrb": np.array(item.crop_ltrb)}
    if fingerprint is not None:
        parts[NOTE] = note_of(fingerprint, source_name, parts["latents"])
    _put(path, parts, bucket_size, arch, sync=sync)


def bring_over(source: Path, keys: str, path: Path, bucket_size: Size, arch: Architecture) -> Reason | None:
    """Put the latents of `source` whose keys end in `keys` where a reader of this family finds them in `path`.

    Nothing is encoded, and every array stays what it is. In one file they are moved; another `source` stays as it is.
    Returns what is wrong if they cannot be read. Raises `LatentStoreError` where the file cannot be written.
    """
    try:
        with OpenNpz(source) as file:
            parts = {part: file.array(part + keys) for part in _PARTS if part + keys in file.names}
    except BROKEN as error:
        return Reason(Stale.BROKEN, error or type(error).__name__)
    if "latents" in parts:  # or else another process was faster
        _put(path, parts, bucket_size, arch)
    return None


def _put(
    path: Path, parts: dict[str, npt.NDArray[Any]], bucket_size: Size, arch: Architecture, *, sync: bool = True
) -> None:
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
    Raises `LatentStoreError` where they are missing or broken."""
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


def convert_values(latents: npt.NDArray[np.float32], space: LatentSpace, arch: Architecture) -> npt.NDArray[np.float32]:
    """Turn latents [C, h, w], or many, of `space` into what sd-scripts caches for `arch`. Raises `LatentStoreError` for
    raw latents of a family (Anima) whose autoencoder scales each channel on its own."""
    if space.values == arch.values:
        return latents
    if arch.per_channel:
        raise LatentStoreError(
            f"{arch.name} caches latents as its own autoencoder normalizes each channel, and these are raw: "
            "encode with that autoencoder (AutoencoderKLQwenImage)"
        )
    if arch.values == "scaled":
        latents = np.float32(arch.scale_factor) * (latents - np.float32(arch.shift_factor))
    else:
        latents = latents / np.float32(space.scale_factor) + np.float32(space.shift_factor)
    return latents


def mask_values(mask: npt.NDArray[np.uint8] | None, bucket_size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """The alpha channel of a bucket (width, height) as npz hold it: [H, W] in 0..1. None is an opaque image's."""
    return np.ones(bucket_size[::-1], np.float32) if mask is None else mask.astype(np.float32) / np.float32(255)


@dataclass(frozen=True)
class TextFamily:
    """How sd-scripts caches one family's outputs: its name here and in `--arch`, what stands in place of an image's
    ending, and the arrays that its files must have."""

    name: str
    suffix: str
    arrays: tuple[str, ...]


TEXT_FAMILIES = {
    family.name: family
    for family in (
        TextFamily("sdxl", "_te_outputs.npz", ("hidden_state1", "hidden_state2", "pool2")),
        TextFamily("sd3", "_sd3_te.npz", ("lg_out", "lg_pooled", "t5_out", "clip_l_attn_mask", "clip_g_attn_mask",
                                          "t5_attn_mask", "apply_lg_attn_mask", "apply_t5_attn_mask")),
        TextFamily("flux", "_flux_te.npz", ("l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask")),
        TextFamily("lumina", "_lumina_te.npz", ("hidden_state", "attention_mask", "input_ids")),
        TextFamily("hunyuan_image", "_hi_te.npz", ("vlm_embed", "vlm_mask", "byt5_embed", "byt5_mask", "ocr_mask")),
        TextFamily("anima", "_anima_te.npz", ("prompt_embeds", "attn_mask", "t5_input_ids", "t5_attn_mask",
                                              "caption_dropout_rate")),
    )
}  # fmt: skip


def collection_of_file(suffix: str) -> str:
    """The family whose files end so; of one that is not known, the ending itself."""
    return next((family.name for family in TEXT_FAMILIES.values() if family.suffix == suffix), suffix)


MARKS = ("kohya_bucket_caption", "kohya_bucket_text_encoders", "kohya_bucket_tokens")
CAPTION_KEY, ENCODERS_KEY, TOKENS_KEY = MARKS
DROPOUT_KEY = "caption_dropout_rate"  # sd-scripts' own, for some model families


def text_marks(caption: str | Iterable[str], encoders: str = "", tokens: str = "") -> dict[str, npt.NDArray[np.uint8]]:
    """What to save beside outputs: their caption, and where they are known hashes of the encoders and the tokens."""
    said = {CAPTION_KEY: caption_bytes(caption), ENCODERS_KEY: encoders.encode(), TOKENS_KEY: tokens.encode()}
    return {key: np.frombuffer(text, dtype=np.uint8) for key, text in said.items() if text or key == CAPTION_KEY}


def check_text_npz(
    path: str | os.PathLike[str], required: Iterable[str] = (), caption: Caption | None = None,
    encoding: Encoding | None = None,
) -> Reason | None:  # fmt: skip
    """Why cached outputs cannot be used, or None: every byte is read, so what is broken shows.

    With `caption`, those of another one, or saved with another `caption_dropout_rate`, which is trained with, are
    refused; with `encoding` those of other encoders or tokens. What a file does not say is believed.
    """
    try:
        with OpenNpz(Path(path)) as file:
            if missing := [name for name in required if name not in file.names]:
                return Reason(Stale.PART, missing[0])
            if damaged := file.damaged():
                return Reason(Stale.CHECKSUM, damaged)
            said = {name: file.array(name).tobytes() for name in MARKS if name in file.names}
            rate = None
            if caption is not None and DROPOUT_KEY in file.names:
                with as_damage(DROPOUT_KEY, error=BrokenNpzError):
                    rate = float(file.array(DROPOUT_KEY))
    except FileNotFoundError:
        return Reason(Stale.MISSING)
    except BROKEN as error:
        return Reason(Stale.BROKEN, error or type(error).__name__)
    stored = {
        "source_hash": content_hash(said[CAPTION_KEY]) if CAPTION_KEY in said else "",
        "vae": said.get(ENCODERS_KEY, b"").decode("ascii", "replace"),
        "interpolation": said.get(TOKENS_KEY, b"").decode("ascii", "replace"),
    }
    wanted = (encoding or Encoding()).columns | {"source_hash": "" if caption is None else caption.text_hash}
    for reason in why_different(stored, wanted):
        return reason
    if caption is not None and rate not in (None, float(np.float32(caption.dropout))):
        return Reason(Stale.DROPOUT, rate, caption.dropout)
    return None
