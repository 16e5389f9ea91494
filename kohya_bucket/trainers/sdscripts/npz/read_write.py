"""sd-scripts' own latent caches: one npz beside each image, for every model family it has.

Source: the `LatentsCachingStrategy` classes of kohya-ss/sd-scripts 0.10.1 to 0.12. Files are byte by byte what it
writes, plus one key (`NOTE`) that says what the latents were made from. sd-scripts' readers ignore it and its writer
carries it over, so it also says which latents it belongs to. Arrays are moved between keys with a size and plain ones
as the reader at hand needs them: docs/latent-format.md says which version looks where.

Anybody may have written a file: nothing is unpacked before what it states of itself was compared with its length.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.errors import LatentStoreError, as_damage, reading, why_not_written
from kohya_bucket.files import update_file
from kohya_bucket.images.stamps import hash_bytes
from kohya_bucket.inputs import open_input
from kohya_bucket.latents.fingerprint import NOTE, Fingerprint, Stale, StaleReason, why_different
from kohya_bucket.latents.finite import all_finite
from kohya_bucket.latents.items import Caption, Encoding, caption_bytes
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.trainers.sdscripts.families import Family


class BrokenNpzError(LatentStoreError):
    """A file that is not an npz, or one that is damaged, or states what cannot be."""


def file_reason(error: FileNotFoundError | BrokenNpzError) -> StaleReason:
    """Why what a file should hold does not serve, where it could not be opened."""
    return StaleReason(Stale.MISSING) if isinstance(error, FileNotFoundError) else StaleReason(Stale.BROKEN, error)


_MOST = 1 << 32  # bytes, unpacked
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _Watched:
    """An open file that keeps the error of a read: `zipfile` takes every error near the end for the lack of a zip."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.failed: OSError | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            self.failed = error
            raise

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET and offset < 0:  # for the system an invalid argument, as of a share that is away
            raise ValueError(f"a damaged directory has a member at {offset}")
        return self._file.seek(offset, whence)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class OpenNpz:
    """A file as `np.savez` writes it, to be used in a `with`; or its content, where that is read already.

    Every use may raise `BrokenNpzError`, and `UnreadableError` where the file cannot be read now.

    Raises:
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        with as_damage("no npz", error=BrokenNpzError), reading(path):
            self._file = _Watched(open_input(path) if content is None else io.BytesIO(content))
            try:
                self._archive = zipfile.ZipFile(self._file)
            except Exception as error:  # a damaged directory has no error of its own
                self._file.close()
                raise self._file.failed or error from None
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
        """An array of finite floating-point numbers of this shape."""
        if self.shape(name) != shape:  # before it is unpacked: it may claim to be large
            raise BrokenNpzError(f"{name} has shape {list(self.shape(name))}, not {list(shape)}")
        array = self.array(name)
        if array.dtype.kind != "f":
            raise BrokenNpzError(f"{name} holds {array.dtype}, not floating-point numbers")
        if not all_finite(array):
            raise BrokenNpzError(f"{name} is not finite (NaN or infinity)")
        return array

    def crc(self, name: str) -> int:
        """Checksum that the directory states, see `member_crc`."""
        return self._members[f"{name}.npy"].CRC

    def is_cut_off(self, name: str) -> bool:
        member = self._members[f"{name}.npy"]
        return member.compress_type == zipfile.ZIP_STORED and member.file_size > member.compress_size

    def fault(self, names: Iterable[str] | None = None) -> StaleReason | None:
        """What is wrong with the first array whose bytes have not the checksum stated, or that is not finite.

        Of all (None) or these, every byte is read.
        """
        for name in self._members if names is None else [f"{name}.npy" for name in names]:
            shown, finite = name.removesuffix(".npy"), True
            try:
                with self._member(name) as (file, _):
                    floats = _float_type(file)
                    while piece := file.read(_PIECE):
                        whole = len(piece) // floats.itemsize if floats else 0
                        finite = finite and (not floats or all_finite(np.frombuffer(piece, floats, whole)))
            except BrokenNpzError:
                return StaleReason(Stale.CHECKSUM, shown)
            if not finite:
                return StaleReason(Stale.NOT_FINITE, shown)
        return None

    def copy_to(self, out: zipfile.ZipFile, content: bytes, renamed: Mapping[str, str]) -> None:
        """Put each member into another file as it lies in `content`, whatever it is and however it is packed: under
        its new name, or not at all where that is "". One of ours that is damaged is left out.

        Raises:
            LatentStoreError: one that is not ours is not a whole member.
        """
        assert out.fp is not None
        out.comment = self._archive.comment
        for name, member in self._members.items():
            new = renamed.get(name, name)
            # What of ours is damaged can be made again: it is left out.
            if not new or (_OURS.fullmatch(name) and self.fault([name[:-4]])):
                continue
            # Its bytes lie behind its header, and the name and extra field that follow that.
            at, data = member.header_offset, None
            if content[at : at + 4] == b"PK\3\4" and at + _LOCAL.size <= len(content):
                begin = at + _LOCAL.size + sum(_LOCAL.unpack_from(content, at)[-2:])
                data = content[begin : begin + member.compress_size]
            if data is None or len(data) != member.compress_size:
                raise LatentStoreError(_kept(self.path, f"{name[:80]!r} in it, which is not ours, is damaged"))
            # The bytes are copied as they are packed, and the new directory says where they lie.
            copied = copy.copy(member)
            copied.filename, copied.header_offset = new, out.fp.tell()
            copied.flag_bits &= ~8  # its length stands before it
            out.fp.write(copied.FileHeader())
            out.fp.write(data)
            out.filelist.append(copied)
            out.NameToInfo[new] = copied
            out.start_dir = out.fp.tell()

    @contextmanager
    def _member(self, name: str) -> Iterator[tuple[Any, int]]:
        with as_damage(name, error=BrokenNpzError), reading(self.path):
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


_PIECE = 1 << 20  # bytes, of whole numbers


def _float_type(file: Any) -> np.dtype[Any] | None:
    """The type of an array of floating-point numbers, whose header is read; None of anything else."""
    try:
        dtype = _header(file)[2]
    except (ValueError, KeyError):
        return None
    return dtype if dtype.kind == "f" else None


_LOCAL = struct.Struct("<4s5H3I2H")  # what precedes a member
Array = npt.NDArray[Any]
Plan = Callable[["OpenNpz | None"], tuple[Mapping[str, str], Mapping[str, Array]]]
"""Of what is there: which members are renamed, or to go (""), and which arrays are added."""


def write_arrays(path: Path, arrays: Mapping[str, Array], *, sync: bool = True) -> None:
    """`np.savez` in place of those of the same names; all else in the file stays, byte for byte.

    Raises:
        LatentStoreError: as `update_file`; or what is there is neither an npz nor what is left of one of ours.
    """
    gone = {f"{name}.npy": "" for name in arrays}
    _rewrite(path, lambda _: (gone, arrays), sync=sync)


def _rewrite(path: Path, plan: Plan, *, first: Mapping[str, Array] | None = None, sync: bool) -> None:
    """As `plan` says, behind the arrays `first`, which stand in place of what has their names."""

    def change(content: bytes | None) -> bytes:
        out, before = io.BytesIO(), _parsed(path, content)
        renamed, arrays = plan(before)
        with zipfile.ZipFile(out, "w") as new:
            _add(new, first or {})
            if before is not None:
                before.copy_to(new, content or b"", {**renamed, **dict.fromkeys(new.namelist(), "")})
            _add(new, arrays)
        return out.getvalue()

    update_file(path, change, sync=sync, why=partial(why_not_written, elsewhere=_ELSEWHERE))


def _add(archive: zipfile.ZipFile, arrays: Mapping[str, Array]) -> None:
    """As numpy does, but without a copy of what lies in one piece."""
    for name, array in arrays.items():
        array = np.asanyarray(array)
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
            if array.flags.c_contiguous and array.size and not array.dtype.hasobject:
                np.lib.format.write_array_header_1_0(member, np.lib.format.header_data_from_array_1_0(array))
                member.write(array.reshape(-1).view(np.uint8).data)
            else:
                np.lib.format.write_array(member, array, allow_pickle=False)


_ELSEWHERE = (
    "keep latents elsewhere, since npz lie beside their images: as shards, which can lie anywhere (--format shards "
    '--output DIR; in training latent_cache = "shards" and latent_cache_dir), or under an --output'
)


def _parsed(path: Path, content: bytes | None) -> OpenNpz | None:
    """What is in a file that is to be changed; None where there is nothing, or what is left of one of ours."""
    if content is None:
        return None
    try:
        return OpenNpz(path, content)
    except BrokenNpzError:
        # What is left of ours begins with one of our members, or a power failure made zeros of it.
        length = _LOCAL.unpack_from(content)[-2] if len(content) > _LOCAL.size else 0
        first = content[_LOCAL.size : _LOCAL.size + length].decode("utf-8", "replace")
        ours = content[:4] == b"PK\3\4" and _OURS.fullmatch(first)
        if not ours and content.strip(b"\0"):
            raise LatentStoreError(_kept(path, "it is not an npz")) from None
        return None


def _kept(path: Path, why: str) -> str:
    return f"{path} is left as it is: {why}; move it away, or delete it if it was a cache, and run again"


def refuse_foreign(path: Path) -> None:
    """Raise `LatentStoreError` for a file that `write_arrays` would not write into."""
    with suppress(FileNotFoundError), reading(path), open_input(path) as file:
        _parsed(path, file.read(_MOST))


def member_crc(array: npt.NDArray[Any]) -> int:
    """CRC-32 of an array as it lies in an npz."""
    array = np.asarray(array)
    out = io.BytesIO()
    if not array.flags.c_contiguous:
        np.lib.format.write_array(out, array, allow_pickle=False)
        return zlib.crc32(out.getbuffer())
    np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(out.getbuffer()))


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
                return Fingerprint.from_json(note), source
    return None


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
    arch: Family,
    fingerprint: Fingerprint | None = None,
    *,
    source_name: str = "",
    sync: bool = True,
) -> None:
    """Write one image's latents as sd-scripts does, but whole or not at all.

    A file that is there keeps all else that is in it: other resolutions, also those that another process adds at the
    same time, and whatever is not ours. (sd-scripts takes an `IMAGE.npz` for an old cache, whatever is in it.) What is
    left of a cache, such as one that is cut off, is replaced.

    Raises:
        LatentStoreError: the latents' shape does not belong to the bucket; or the file cannot be written, or is there
            and is not an npz.
        UnreadableError: what is there cannot be read now.
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


def rekey(source: Path, keys: str, path: Path, bucket_size: Size, arch: Family) -> StaleReason | None:
    """Put the latents of `source` whose keys end in `keys` where a reader of this family finds them in `path`.

    Nothing is encoded, and every array stays what it is. In one file they are moved; another `source` stays as it is.
    Returns what is wrong if they cannot be read. Raises `LatentStoreError` where the file cannot be written.
    """
    try:
        with OpenNpz(source) as file:
            parts = {part: file.array(part + keys) for part in _PARTS if part + keys in file.names}
    except (FileNotFoundError, BrokenNpzError) as error:
        return file_reason(error)
    if "latents" in parts:  # or else another process was faster
        _put(path, parts, bucket_size, arch)
    return None


def _put(path: Path, parts: dict[str, npt.NDArray[Any]], bucket_size: Size, arch: Family, *, sync: bool = True) -> None:
    """Write the arrays of one size in place of those that the file has of it, whatever their keys.

    Plain keys have room for one size: what they hold of another gets keys with its size.
    """
    new_keys = arch.key_suffix(bucket_size)

    def plan(file: OpenNpz | None) -> tuple[dict[str, str], dict[str, Array]]:
        plain_shape = () if file is None else _plain_shape(file)
        renamed: dict[str, str] = {}  # "" for what goes
        # What the file has of this size goes, with keys of either kind.
        for keys in arch.key_suffixes(bucket_size):
            if keys or plain_shape == arch.shape(bucket_size):
                renamed |= {f"{part}{keys}.npy": "" for part in _PARTS}
        # Plain keys are taken: those of another size get keys that say it, unless there are such already.
        if not new_keys and file is not None:
            is_latent = len(plain_shape) == 3 and plain_shape[0] == arch.channels
            sized_keys = f"_{plain_shape[-2]}x{plain_shape[-1]}" if is_latent else ""
            are_kept = is_latent and f"latents{sized_keys}" not in file.names
            for part in _PARTS:
                renamed.setdefault(f"{part}.npy", f"{part}{sized_keys}.npy" if are_kept else "")
        return renamed, {part + new_keys: parts[part] for part in _PARTS if part in parts}

    _rewrite(path, plan, sync=sync)


def _plain_shape(file: OpenNpz) -> tuple[int, ...]:
    """Shape of the latents with plain keys; () where there are none, or damaged ones."""
    if "latents" not in file.names:
        return ()
    try:
        return file.shape("latents")
    except BrokenNpzError:
        if file.fault(["latents"]):
            return ()
        raise LatentStoreError(_kept(file.path, "its 'latents' are none")) from None


def read_npz(path: Path, bucket_size: Size, arch: Family) -> NpzLatents:
    """The latents of one bucket, whichever kind of keys they have; first those that this family's readers ask for.
    Raises `LatentStoreError` where they are missing or broken."""
    other = None
    try:
        with OpenNpz(path) as file:
            for keys in arch.key_suffixes(bucket_size):
                if f"latents{keys}" in file.names:
                    item = read_keys(file, keys, arch)
                    if item.latents.shape == arch.shape(bucket_size):
                        return item
                    other = other or item.latents.shape
    except FileNotFoundError as error:
        raise LatentStoreError(f"{path} does not exist") from error
    except BrokenNpzError as error:
        raise LatentStoreError(f"{path} is broken ({error}): delete it, it will be made again") from error
    if other is None:
        raise LatentStoreError(f"{path} has no latents for {bucket_size[0]}x{bucket_size[1]} ({arch.name})")
    raise LatentStoreError(
        f"{path} holds latents of shape {list(other)}, but {arch.name} at "
        f"{bucket_size[0]}x{bucket_size[1]} needs {list(arch.shape(bucket_size))}"
    )


def read_keys(file: OpenNpz, keys: str, arch: Family) -> NpzLatents:
    """The latents whose keys end in `keys`. Raises as `OpenNpz`."""
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


def sizes_in(file: OpenNpz, arch: Family) -> list[tuple[Size, str]]:
    """Bucket (width, height) and end of the keys of all latents of this family in a file. Raises as `OpenNpz`.

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


def _flat(latents: Any, arch: Family) -> Any:
    """Without the axis of length 1 that early caches of Anima have."""
    old = arch.per_channel and latents is not None and latents.ndim == 4 and latents.shape[1] == 1
    return latents[:, 0] if old else latents


def convert_values(latents: npt.NDArray[np.float32], space: LatentSpace, arch: Family) -> npt.NDArray[np.float32]:
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


# names of outputs in the caches of SDXL, SD3, Flux, Lumina, HunyuanImage and Anima
TEXT_ARRAYS = {
    "hidden_state1", "hidden_state2", "pool2",
    "lg_out", "lg_pooled", "t5_out", "clip_l_attn_mask", "clip_g_attn_mask", "t5_attn_mask", "apply_lg_attn_mask",
    "apply_t5_attn_mask",
    "l_pooled", "txt_ids",
    "hidden_state", "attention_mask", "input_ids",
    "vlm_embed", "vlm_mask", "byt5_embed", "byt5_mask", "ocr_mask",
    "prompt_embeds", "attn_mask", "t5_input_ids",
}  # fmt: skip
MARKS = ("kohya_bucket_caption", "kohya_bucket_text_encoders", "kohya_bucket_tokens")
CAPTION_KEY, ENCODERS_KEY, TOKENS_KEY = MARKS
DROPOUT_KEY = "caption_dropout_rate"  # sd-scripts' own, for some model families
# members that a cache of latents or of text outputs has
_OURS = re.compile(rf"(({'|'.join(_PARTS)})(_\d+x\d+)?|{'|'.join(sorted({*TEXT_ARRAYS, *MARKS, DROPOUT_KEY}))})\.npy")


def place_text_npz(path: Path, outputs: Mapping[str, Array], marks: Mapping[str, Array]) -> None:
    """A caption's outputs as `np.savez` writes them, and `marks`, in place of what the file has; nothing is synced.

    Raises:
        LatentStoreError: as `write_arrays`.
    """
    gone = {f"{name}.npy": "" for name in (*TEXT_ARRAYS, *MARKS, DROPOUT_KEY)}
    _rewrite(path, lambda _: (gone, marks), first=outputs, sync=False)


def text_marks(caption: str | Iterable[str], encoders: str = "", tokens: str = "") -> dict[str, npt.NDArray[np.uint8]]:
    """What to save beside outputs: their caption, and where they are known hashes of the encoders and the tokens."""
    said = {CAPTION_KEY: caption_bytes(caption), ENCODERS_KEY: encoders.encode(), TOKENS_KEY: tokens.encode()}
    return {key: np.frombuffer(text, dtype=np.uint8) for key, text in said.items() if text or key == CAPTION_KEY}


def text_stale_reasons(
    path: str | os.PathLike[str], caption: Caption | None = None, encoding: Encoding | None = None
) -> list[StaleReason]:
    """Why cached outputs cannot be used; none if they can. Every byte is read, so what is broken shows.

    With `caption`, those of another one, or saved with another `caption_dropout_rate`, which is trained with, are
    refused; with `encoding` those of other encoders or tokens. What a file does not say is believed.
    """
    try:
        with OpenNpz(Path(path)) as file:
            if fault := file.fault():
                return [fault]
            said = {name: file.array(name).tobytes() for name in MARKS if name in file.names}
            rate = None
            if caption is not None and DROPOUT_KEY in file.names:
                with as_damage(DROPOUT_KEY, error=BrokenNpzError):
                    rate = float(file.array(DROPOUT_KEY))
    except (FileNotFoundError, BrokenNpzError) as error:
        return [file_reason(error)]
    stored = {
        "source_hash": hash_bytes(said[CAPTION_KEY]) if CAPTION_KEY in said else "",
        "vae": said.get(ENCODERS_KEY, b"").decode("ascii", "replace"),
        "interpolation": said.get(TOKENS_KEY, b"").decode("ascii", "replace"),
    }
    wanted = (encoding or Encoding()).columns | {"source_hash": "" if caption is None else caption.text_hash}
    reasons = why_different(stored, wanted)
    if caption is not None and rate not in (None, float(np.float32(caption.dropout))):
        reasons.append(StaleReason(Stale.DROPOUT, rate, caption.dropout))
    return reasons
