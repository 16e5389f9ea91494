"""How often regularization images are repeated. Source: the end of sd-scripts' `DreamBoothDataset.__init__`."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["balanced"]


def balanced(repeats: Sequence[int], wanted: int) -> list[int]:
    """How often each regularization image is trained, so that together they are trained `wanted` times.

    The images are taken in order, each with its own repeats, until `wanted` is reached; those beyond are not
    trained (0). If all are taken and it is not reached, each gets one more, in turn.

    Args:
        repeats: each image's own repeats, 1 or more.
        wanted: training images, counted with repeats.
    """
    out = [0] * len(repeats)
    count = 0
    for i, own in enumerate(repeats):
        if count >= wanted:
            return out
        out[i] = own
        count += own
    if not out:
        return out
    whole, rest = divmod(max(0, wanted - count), len(out))
    return [n + whole + (i < rest) for i, n in enumerate(out)]
