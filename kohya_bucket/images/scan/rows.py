"""The rows that `WORK` makes, as numpy columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.files.content_hash import HASH_LENGTH

__all__ = ["Rows", "row_dtype"]

Rows = npt.NDArray[Any]

_CLIP = [(name, "i8") for name in ("width", "height", "frames", "rate", "per", "rotation", "source")]
_DTYPES = {
    "size": np.dtype([("width", "i8"), ("height", "i8"), ("orientation", "i8"), ("format", "i8")]),
    "stat": np.dtype([("mtime_ns", "i8"), ("bytes", "i8")]),
    "hash": np.dtype([("hash", f"S{HASH_LENGTH}")]),
    "verify": np.dtype([("ok", "u1")]),
    "clip": np.dtype(_CLIP),
    "decoded clip": np.dtype(_CLIP),
}


def row_dtype(work: str) -> np.dtype[Any]:
    """Columns of a piece of work, by its name."""
    return _DTYPES[work]
