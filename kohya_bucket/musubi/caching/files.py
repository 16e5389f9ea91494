"""A cache file: a whole safetensors file, whose header says what it was made from.

Layout: 8 bytes little-endian header length, a JSON header that gives each tensor's type, shape and byte range, then the
tensors. Texts about the whole file are in the header too. One of them is our note, which musubi-tuner does not
read. It keeps texts that it does not know when it writes outputs of text encoders anew, so the note also
says which content it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.errors import LatentStoreError, as_damage, why_not_written
from kohya_bucket.files import replacing
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.npz.read_write import NOTE
from kohya_bucket.musubi.caching.made_by import MadeBy
from kohya_bucket.musubi.caching.sources import Identity

__all__ = [
    "REPAIRED",
    "BrokenFileError",
    "LatentsNote",
    "TensorFile",
    "TextNote",
    "read_latents_note",
    "read_tensor_file",
    "read_text_note",
    "texts_of",
    "write_with_texts",
]

_TEXTS = "__metadata__"
_MOST = 1 << 24  # bytes of a header
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
          "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}  # fmt: skip
_FIRST = 4096  # bytes of the tensors that `content` is of


class BrokenFileError(LatentStoreError):
    """What lies there is no whole safetensors file."""


@dataclass(frozen=True)
class TensorFile:
    """What the header of a whole file says.

    Attributes:
        texts: by name.
        shapes: of each tensor, by its name.
        content: hash of the table of tensors and their first bytes: another one once somebody has written the file
            anew and kept its texts.
    """

    texts: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    content: str


def read_tensor_file(path: Path) -> TensorFile:
    """The header of a file.

    Raises:
        BrokenFileError: it is cut off, or something else.
        FileNotFoundError: it is not there.
    """
    with as_damage(path.name, error=BrokenFileError), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else _MOST
        if 8 + length > min(size, _MOST):
            raise BrokenFileError(f"{size} bytes, no whole header")
        table = json.loads(file.read(length))
        texts = table.pop(_TEXTS, {})
        _check_tensors(table, 8 + length, size)
        shapes = {name: tuple(int(side) for side in spec["shape"]) for name, spec in table.items()}
        digest = hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16)
        digest.update(file.read(_FIRST))
        return TensorFile({str(name): str(text) for name, text in texts.items()}, shapes, digest.hexdigest())


def _check_tensors(table: dict[str, Any], begin: int, size: int) -> None:
    """Refuse tensors that do not lie one after the other from `begin` to the file's end, as the format demands."""
    at = 0
    for name, spec in sorted(table.items(), key=lambda item: list(item[1]["data_offsets"])):
        (start, end), shape, kind = spec["data_offsets"], spec["shape"], spec["dtype"]
        sound = kind in _BYTES and all(type(side) is int and side >= 0 for side in shape)
        if not sound or start != at or end - start != math.prod(shape) * _BYTES[kind]:
            raise BrokenFileError(f"{name!r} is {kind} {shape} in bytes {start} to {end}")
        at = end
    if begin + at != size:
        raise BrokenFileError(f"{size} bytes of {begin + at}")


def write_with_texts(
    path: Path, write: Callable[[Path], object], texts: Callable[[TensorFile], dict[str, str]]
) -> None:
    """What `write` makes of a path, as `path` with further texts, whole or not at all.

    Raises:
        LatentStoreError: the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write(temporary)
            more = texts(read_tensor_file(temporary))
            if more:
                content = temporary.read_bytes()
                with open(temporary, "wb") as out:
                    out.writelines(_with_texts(memoryview(content), more))
    except OSError as error:
        raise LatentStoreError(f"cannot write {path}: {why_not_written(error)}") from error


def _with_texts(content: memoryview, more: dict[str, str]) -> list[Any]:
    length = struct.unpack("<Q", content[:8])[0]
    table = json.loads(bytes(content[8 : 8 + length]))
    table = {_TEXTS: table.pop(_TEXTS, {}) | more, **table}
    text = json.dumps(table, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(len(text) + 8) % 64)
    return [struct.pack("<Q", len(text)), text, content[8 + length :]]


REPAIRED = "repaired"
"""Key in what made a text's outputs: an encoder that gave wrong ones in earlier versions gives right ones."""
Settings = dict[str, Any]
"""Keys of the data set that decide what is encoded, besides those that decide the bucket."""


@dataclass(frozen=True)
class LatentsNote:
    """What latents were made from.

    Attributes:
        fingerprint: of the image or video itself.
        further: of further targets and control images, in order.
        settings: of the data set.
        clips: all that were made of the video, as (first frame, frames).
        made_by: models and options.
    """

    fingerprint: Fingerprint
    further: list[Identity] = field(default_factory=list)
    settings: Settings = field(default_factory=dict)
    clips: list[tuple[int, int]] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=dict)


@dataclass(frozen=True)
class TextNote:
    """What outputs of text encoders were made from besides the caption, which musubi-tuner writes beside them.

    Attributes:
        seen: the images that the encoder saw with the caption, in order.
        made_by: models and options.
        settings: of the data set, where the encoder saw images.
        clips: all of the video that have outputs, where each has its own.
    """

    seen: list[Identity] = field(default_factory=list)
    made_by: MadeBy = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    clips: list[tuple[int, int]] = field(default_factory=list)


def texts_of(note: LatentsNote | TextNote, file: TensorFile) -> dict[str, str]:
    """The text to write beside the tensors of `file`."""
    return {NOTE: json.dumps(asdict(note) | {"content": file.content})}


def read_latents_note(file: TensorFile) -> LatentsNote | None:
    """None where there is none, or where somebody has written the tensors anew since: then nothing is known."""
    with suppress(BrokenFileError), as_damage(NOTE, error=BrokenFileError):
        said = _said(file)
        if said is not None:
            return LatentsNote(
                Fingerprint.of(said["fingerprint"]),
                [_identity(one) for one in said["further"]],
                dict(said["settings"]),
                _clips(said),
                _made_by(said),
            )
    return None


def read_text_note(file: TensorFile) -> TextNote | None:
    """As `read_latents_note`."""
    with suppress(BrokenFileError), as_damage(NOTE, error=BrokenFileError):
        said = _said(file)
        if said is not None:
            seen = [_identity(one) for one in said["seen"]]
            return TextNote(seen, _made_by(said), dict(said.get("settings", {})), _clips(said))
    return None


def _said(file: TensorFile) -> dict[str, Any] | None:
    said = json.loads(file.texts.get(NOTE, "{}"))
    return said if said.get("content") == file.content else None


def _identity(one: Any) -> Identity:
    nbytes, mtime, content = one
    return int(nbytes), int(mtime), str(content)


def _clips(said: dict[str, Any]) -> list[tuple[int, int]]:
    return [(int(first), int(frames)) for first, frames in said.get("clips", [])]


def _made_by(said: dict[str, Any]) -> MadeBy:
    return {str(name): str(value) for name, value in said["made_by"].items()}
