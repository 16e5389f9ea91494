"""diffusion-pipe: aspects spread evenly in log space; nearest log aspect; the aspect's size per resolution.

Source: tdrussell/diffusion-pipe, `utils/dataset.py` and `examples/dataset.toml` (whose seven aspects from 0.5 to 2
are the defaults here). Rounds to 16 pixels, to 32 for some models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.buckets.trainers.base import SetTrainer, positive, round_to_multiple
from kohya_bucket.errors import BucketSettingsError

__all__ = ["DiffusionPipeBuckets"]

_DIGITS = 3


class DiffusionPipeBuckets(SetTrainer):
    """An image goes to the nearest aspect; aspects whose sizes round to the same share a bucket.

    Args:
        resolution: side in pixels whose area the buckets have about.
        min_ar, max_ar, num_ar_buckets: the range of aspects and their number.
        ar_buckets: the aspects themselves instead, as numbers.
        multiple: sides are rounded to a multiple of this.
    """

    def __init__(
        self,
        resolution: int = 1024,
        min_ar: float = 0.5,
        max_ar: float = 2.0,
        num_ar_buckets: int = 7,
        ar_buckets: Iterable[float] | None = None,
        multiple: int = 16,
    ) -> None:
        positive(resolution=resolution, num_ar_buckets=num_ar_buckets, multiple=multiple)
        if not 0 < min_ar <= max_ar:
            raise BucketSettingsError(f"min_ar {min_ar} and max_ar {max_ar} are not a range of positive aspects")
        aspects = np.geomspace(min_ar, max_ar, num_ar_buckets) if ar_buckets is None else list(ar_buckets)
        rounded = sorted({round(float(a), _DIGITS) for a in aspects})
        self._log_aspects = np.log(rounded)
        positions: dict[tuple[int, int], int] = {}
        self._position = []
        for aspect in rounded:
            width = math.sqrt(resolution**2 * aspect)
            sides = (width, resolution**2 / width)
            size = (round_to_multiple(sides[0], multiple), round_to_multiple(sides[1], multiple))
            self._position.append(positions.setdefault(size, len(positions)))
        super().__init__(BucketSet.from_dims(positions, name="diffusion-pipe", vae_factor=multiple))

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        log_aspect = np.log(width / height)
        # Few aspects, and the trainer's logarithms decide: compare them as it does.
        nearest = np.zeros(len(width), dtype=np.intp)
        least = np.full(len(width), np.inf)
        for k, candidate in enumerate(self._log_aspects):
            distance = np.abs(log_aspect - candidate)
            better = distance < least
            nearest[better], least[better] = k, distance[better]
        return np.asarray(self._position, dtype=np.int32)[nearest]
