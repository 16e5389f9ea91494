"""Texts in a file of tensors that a trainer writes.

Layout of safetensors: 8 bytes little-endian header length, a JSON header that gives each tensor's type, shape and byte
range, then the tensors. Texts about the whole file are in the header too; trainers pass over those that are not theirs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

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
