"""Texts in a file of tensors that a trainer writes.

Layout of safetensors: 8 bytes little-endian header length, a JSON header that gives each tensor's type, shape and byte
range, then the tensors. Texts about the whole file are in the header too; trainers pass over those that are not theirs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from kohya_bucket.latents.finite import all_finite

TEXTS = "__metadata__"
"""Key of the header under which the texts stand."""


def parts_of(content: bytes) -> tuple[dict[str, Any], memoryview]:
    """The header of a whole file, and its tensors."""
    end = 8 + struct.unpack_from("<Q", content)[0]
    return json.loads(content[8:end]), memoryview(content)[end:]


def with_texts(content: bytes, texts: Mapping[str, str]) -> bytes:
    """A whole file with further texts."""
    table, tensors = parts_of(content)
    header = json.dumps({TEXTS: table.pop(TEXTS, {}) | texts, **table}, separators=(",", ":")).encode("utf-8")
    header += b" " * (-(len(header) + 8) % 64)
    return b"".join((struct.pack("<Q", len(header)), header, tensors))


_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
_FLOATS_OF_8_BITS = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7C}
"""The least bits, without the sign, that are not finite."""
_PIECE = 1 << 22


def not_finite(file: BinaryIO) -> str:
    """The name of a tensor of a whole file that holds NaN or infinity; an empty text where none does."""
    (length,) = struct.unpack("<Q", file.read(8))
    for name, spec in json.loads(file.read(length)).items():
        kind = spec["dtype"] if name != TEXTS else ""
        if kind in _FLOATS or kind in _FLOATS_OF_8_BITS:
            start, end = spec["data_offsets"]
            file.seek(8 + length + start)
            for at in range(start, end, _PIECE):
                if not _is_finite(file.read(min(_PIECE, end - at)), kind):
                    return str(name)
    return ""


def _is_finite(values: bytes, kind: str) -> bool:
    if kind in _FLOATS:
        return all_finite(np.frombuffer(values, _FLOATS[kind]))
    return int((np.frombuffer(values, np.uint8) & 0x7F).max(initial=0)) < _FLOATS_OF_8_BITS[kind]
