"""A safetensors file's header: whether the file is whole, what it holds, what it says of itself, and saying more.

Layout: 8 bytes little-endian header length, a JSON header that gives each tensor's type, shape and byte range, then the
tensors. Texts about the whole file are in the header too.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_bucket.errors import LatentStoreError, as_damage, why_not_written
from kohya_bucket.files import replacing

__all__ = ["BrokenFileError", "TensorFile", "read_tensor_file", "write_with_texts"]

_TEXTS = "__metadata__"
_MOST = 1 << 24  # bytes of a header
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
        end = max((spec["data_offsets"][1] for spec in table.values()), default=0)
        if 8 + length + end != size:
            raise BrokenFileError(f"{size} bytes of {8 + length + end}")
        shapes = {name: tuple(int(side) for side in spec["shape"]) for name, spec in table.items()}
        digest = hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16)
        digest.update(file.read(_FIRST))
        return TensorFile({str(name): str(text) for name, text in texts.items()}, shapes, digest.hexdigest())


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
