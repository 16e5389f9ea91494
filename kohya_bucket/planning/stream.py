"""Random numbers that are the same on every machine, Python and numpy, today and later.

numpy promises that `RandomState` (Mersenne Twister and the distributions of numpy 1.16) never changes its
stream (NEP 19); its newer `Generator` methods carry no such promise, and neither does Python's `random`.
"""

from __future__ import annotations

import enum

import numpy as np

_WORD = 0xFFFFFFFF


class Purpose(enum.IntEnum):
    """What a stream is for. Each has its own, so that one option never shifts the numbers of another."""

    IMAGES = 1
    STEPS = 2
    ROTATION = 3
    PHASES = 4
    REGULARIZATION = 5
    RESOLUTIONS = 6
    SHARDS = 7
    STREAM = 8


def stream(purpose: Purpose, seed: int, epoch: int = -1, part: int = 0) -> np.random.RandomState:
    """The stream of (purpose, seed, epoch, part). Seeds may be any integer; their lowest 64 bits count.

    `part` counts the plannings of one epoch: 0 for the epoch itself, more where its rest is planned again.
    """
    words = [int(purpose), seed & _WORD, (seed >> 32) & _WORD, epoch & _WORD, (epoch >> 32) & _WORD, part]
    return np.random.RandomState(np.array(words, dtype=np.uint32))


def packed_order(
    fractions: np.typing.NDArray[np.float64], groups: np.typing.NDArray[np.integer] | None = None
) -> np.typing.NDArray[np.intp]:
    """The order that sorts by (group, fraction), ties by position. `fractions` lie in [0, 1).

    Group, fraction and position are packed into one 64-bit key. No two keys are equal, so every sorting
    algorithm gives the same result: numpy may take its fastest.
    """
    n = len(fractions)
    position_bits = max(1, (n - 1).bit_length())
    group_bits = 0 if groups is None or n == 0 else int(groups.max()).bit_length()
    fraction_bits = min(48, 64 - position_bits - group_bits)
    keys = np.floor(fractions * float(1 << fraction_bits)).astype(np.uint64)
    if groups is not None:
        keys |= groups.astype(np.uint64) << np.uint64(fraction_bits)
    keys <<= np.uint64(position_bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64((1 << position_bits) - 1)
    return keys.astype(np.intp)
