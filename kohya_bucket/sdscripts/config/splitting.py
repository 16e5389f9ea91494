"""Which images are held back for validation. Source: sd-scripts' `split_train_val`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["split"]

T = TypeVar("T")


def split(items: Sequence[T], share: float, seed: int | None, training: bool) -> list[T]:
    """The training or the validation part, in sd-scripts' order: both come from one shuffled list.

    Both parts are rounded up at .5, so that an image can be in both. Without a seed sd-scripts shuffles from the
    global random state, once for each part; seed 0 stands in for it here.
    """
    shuffled = list(items)
    random.Random(0 if seed is None else seed).shuffle(shuffled)
    if training:
        return shuffled[0 : math.ceil(len(shuffled) * (1 - share))]
    return shuffled[len(shuffled) - round(len(shuffled) * share) :]
