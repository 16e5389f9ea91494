"""Whether arrays hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000, "float64": 0x7FF0_0000_0000_0000}
"""The bits of infinity; those of NaN are larger, and those of finite numbers smaller."""


def all_finite(array: npt.NDArray[Any]) -> bool:
    """Whether no value of an array, of any shape, is NaN or infinity; uint16 are the bits of bfloat16.

    Twice the largest integer in the bits: nothing of the array's size is made. Other integers are finite.
    """
    array = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder())
    infinity = _INFINITY.get("bfloat16" if array.dtype == np.uint16 else array.dtype.name)
    if infinity is None:
        return array.dtype.kind != "f" or bool(np.isfinite(array).all())
    bits = array.dtype.itemsize * 8
    # Of signed integers the positive numbers are the largest, of unsigned ones the negative numbers.
    return bool(
        array.view(f"int{bits}").max(initial=0) < infinity
        and array.view(f"uint{bits}").max(initial=0) < infinity + (1 << bits - 1)
    )


def first_not_finite(tensors: Iterable[tuple[str, Any]]) -> str:
    """The name of the first tensor of torch that holds NaN or infinity; an empty text where none does."""
    for name, tensor in tensors:
        # torch has no isfinite for each float of 8 bits, in which some encoders of captions give theirs
        wide = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        if not bool(wide.isfinite().all()):
            return name
    return ""
