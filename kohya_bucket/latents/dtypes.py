"""Storage types of latents, without torch: names, safetensors codes, and numpy arrays that carry the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError

_TYPES = {
    "float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2"), "uint8": ("U8", "|u1"),
    "float64": ("F64", "<f8"), "int32": ("I32", "<i4"), "int64": ("I64", "<i8"),
}  # fmt: skip
CODES = {name: code for name, (code, _) in _TYPES.items()}
LATENT_DTYPES = ("float32", "float16", "bfloat16")
EXACT = "exact"  # of items that have several arrays, each stored in a type of its own
_WHOLE = ("uint8", "int32", "int64")
STORED_AS = {
    "<f2": ("float16",), "<f4": LATENT_DTYPES, "<f8": ("float64",), "|b1": _WHOLE[:1], "|u1": _WHOLE[:1],
    "|i1": _WHOLE[:2], "<u2": _WHOLE[:2], "<i2": _WHOLE[:2], "<i4": _WHOLE[:2], "<u4": _WHOLE, "<u8": _WHOLE,
    "<i8": _WHOLE,
}  # fmt: skip
"""The storage types that hold every value which arrays of a numpy type may have, see `store.exact_arrays`."""
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "half": "float16"}


def dtype_name(dtype: Any) -> str:
    """Storage type by name, alias ("bf16"), numpy or torch type. `LatentStoreError` for others."""
    text = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else np.dtype(dtype).name
    name = _SHORT.get(text, text)
    if name not in LATENT_DTYPES:
        raise LatentStoreError(f"dtype {text!r}: latents are stored as float32, float16 or bfloat16")
    return name


def carrier(name: str) -> np.dtype[Any]:
    """numpy type that holds the bits of storage type `name`; numpy has no bfloat16, so uint16 carries it."""
    return np.dtype(_TYPES[name][1])


def to_float32(bits: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    """Values of an array in its carrier type, as float32 (exact for every storage type)."""
    if name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)


def from_float32(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[Any]:
    """Round float32 values to storage type `name`, to nearest and ties to even, in its carrier type."""
    if name != "bfloat16":
        return values.astype(carrier(name))
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    # a carry out of a NaN's mantissa would make it an infinity
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)
