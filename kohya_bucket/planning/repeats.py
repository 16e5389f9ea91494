"""How often an image is trained in an epoch: whole numbers, fractions that are exact over epochs, or in rotation."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.stream import Purpose, stream

Counts = npt.NDArray[np.int64]
_LARGEST_DENOMINATOR = 10_000
MOST_TRAININGS = 2**31 - 1
"""Of an epoch, and so of one image too."""
_RANGE = f"0 to {MOST_TRAININGS:,}"


class Repeats:
    """Repeats of N images as exact ratios.

    An image with ratio p/q and phase s (0 <= s < q) has been trained `(e*p + s) // q - s // q` times before
    epoch e. So any q epochs in a row train it exactly p times, and any k of them within one of k*p/q. The
    phases are spread evenly over the images, in a random order that depends on the seed alone: every epoch
    has its fair share.
    """

    def __init__(self, numerator: Counts, denominator: Counts) -> None:
        self.numerator = numerator
        self.denominator = denominator

    @property
    def are_whole(self) -> bool:
        """No image has a fraction: every epoch trains the same."""
        return bool((self.denominator == 1).all())

    def whole(self) -> Counts | None:
        """[N] repeats of every epoch, or None where there are fractions."""
        return self.numerator if self.are_whole else None

    def _phase(self, seed: int) -> Counts:
        numerator, denominator = self.numerator, self.denominator
        phase = np.zeros(len(numerator), dtype=np.int64)
        for q in np.unique(denominator[denominator > 1]):
            for p in np.unique(numerator[denominator == q]):
                rows = np.flatnonzero((denominator == q) & (numerator == p))
                stream(Purpose.PHASES, seed).shuffle(rows)
                phase[rows] = np.arange(len(rows), dtype=np.int64) * q // len(rows)
        return phase

    def before(self, epoch: int, seed: int) -> Counts:
        """[N] times that each image is trained in the epochs 0 to `epoch` - 1 together."""
        return (epoch * self.numerator + self._phase(seed)) // self.denominator


def parse_repeats(repeats: object, n: int) -> int | Repeats:
    """Whole number for all images, or `Repeats` of N images.

    Args:
        repeats: None (once), a number or a `Fraction` for all, or [N] of them. Floats are read as the nearest
            ratio with a denominator of at most 10,000: 0.1 is one tenth, not the binary number beside it.

    Raises:
        PlanError: negative, non-finite or enormous values, another length, floats that no such ratio is near to.
    """
    if repeats is None:
        return 1
    if isinstance(repeats, (int, np.integer)) and not isinstance(repeats, bool):
        if not 0 <= repeats <= MOST_TRAININGS:
            raise PlanError(f"repeats is {repeats}, but must be {_RANGE}")
        return int(repeats)
    given = array_of("repeats", repeats)
    if given.ndim == 0:
        ratio = _ratio(given.item())
        if ratio.denominator == 1:
            return ratio.numerator
        return Repeats(np.full(n, ratio.numerator, dtype=np.int64), np.full(n, ratio.denominator, dtype=np.int64))
    if given.shape != (n,):
        raise PlanError(f"repeats has shape {list(given.shape)}, but there are {n} images: give one for each")
    if given.dtype.kind in "iu":
        for value in (given.min(initial=0), given.max(initial=0)):
            if not 0 <= value <= MOST_TRAININGS:
                raise PlanError(f"repeats holds {value}, but must be {_RANGE}")
        return Repeats(given.astype(np.int64), np.ones(n, dtype=np.int64))
    values, inverse = np.unique(given.astype(np.float64) if given.dtype.kind == "f" else given, return_inverse=True)
    ratios = [_ratio(v) for v in values.tolist()]
    numerator = np.array([r.numerator for r in ratios], dtype=np.int64)[inverse.reshape(-1)]
    denominator = np.array([r.denominator for r in ratios], dtype=np.int64)[inverse.reshape(-1)]
    return Repeats(numerator, denominator)


def _ratio(value: Any) -> Fraction:
    try:
        exact = Fraction(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"repeats holds {value!r}, which is not a number of times to train an image") from error
    if not 0 <= exact <= MOST_TRAININGS:
        raise PlanError(f"repeats holds {value}, but must be {_RANGE}")
    ratio = exact.limit_denominator(_LARGEST_DENOMINATOR)
    if abs(ratio - exact) > Fraction(1, 10**7):
        raise PlanError(
            f"repeats holds {value}, which is near no ratio with a denominator of at most {_LARGEST_DENOMINATOR}: "
            "round it, e.g. to two digits"
        )
    return ratio


def regularization_times(n: int, used_before: int, uses: int, seed: int) -> npt.NDArray[np.int64]:
    """[n] times that each of n regularization images is trained in an epoch.

    The images stand in a circle in an order that depends on the seed alone, and each epoch goes on where the
    last one stopped. So over any number of epochs in a row, the counts of two images differ by at most one.
    (sd-scripts trains the first `uses` images of the list in every epoch: its issue #2096.)

    Args:
        n: images in the set.
        used_before: uses in all epochs before this one together.
        uses: uses in this epoch, normally as many as there are trainings of other images.
    """
    times = np.full(n, uses // n if n else 0, dtype=np.int64)
    if n == 0 or uses == 0:
        return times
    circle = np.arange(n, dtype=np.int64)
    stream(Purpose.REGULARIZATION, seed).shuffle(circle)
    start = used_before % n
    times[circle[(start + np.arange(uses % n)) % n]] += 1
    return times
