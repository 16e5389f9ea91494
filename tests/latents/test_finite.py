"""Whether arrays hold NaN or infinity, by their bits."""

import numpy as np
import pytest

from kohya_bucket.latents.dtypes import from_float32, to_float32
from kohya_bucket.latents.finite import all_finite

_FLOATS = ("float16", "float32", "float64")


@pytest.mark.parametrize("dtype", _FLOATS)
def test_as_numpy_says_of_any_bits(dtype):
    """One value of random bits among finite ones of both signs."""
    rng, size = np.random.default_rng(0), np.dtype(dtype).itemsize
    for bits in rng.bytes(400 * size), b"".join(_edges(dtype)):
        for value in np.frombuffer(bits, dtype):
            array = rng.normal(size=(3, 4, 5)).astype(dtype)
            array[tuple(rng.integers(0, array.shape))] = value
            swapped = array.astype(array.dtype.newbyteorder())
            for one in (array, array[::-1, :, ::2], array.T, np.asfortranarray(array), swapped):
                assert all_finite(one) == np.isfinite(one).all()
    assert not np.isfinite(np.frombuffer(b"".join(_edges(dtype)), dtype)).all()


def _edges(dtype):
    kind = np.finfo(dtype)
    for value in (0.0, kind.max, kind.smallest_subnormal, np.inf, np.nan):
        yield from (np.array(sign * value, dtype).tobytes() for sign in (1, -1))


def test_every_bfloat16():
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = np.isfinite(to_float32(bits, "bfloat16"))
    assert [all_finite(bits[k : k + 1]) for k in range(len(bits))] == expected.tolist()
    assert all_finite(from_float32(np.float32([1, -2, 3e38]), "bfloat16"))


@pytest.mark.parametrize("dtype", [*_FLOATS, "uint16"])
def test_nothing_is_finite(dtype):
    assert all_finite(np.zeros((0, 4), dtype))
    assert all_finite(np.zeros((), dtype))


def test_whole_numbers_are_finite():
    for dtype in ("bool", "uint8", "int8", "int16", "int32", "uint32", "int64", "uint64"):
        assert all_finite(np.full(3, -1).astype(dtype))
