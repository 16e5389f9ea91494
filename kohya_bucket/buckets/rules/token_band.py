"""All sizes of about the same number of tokens: almost nothing is cropped, and every image costs about the same.

For transformers, which pay by the token. Trainers of Anima left fixed bucket tables for such sets (sorryhyun/anima_lora
#53, AnimaLoraStudio #371).
"""

from __future__ import annotations

import math
from typing import Any

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.rules.fixed import FixedBuckets
from kohya_bucket.buckets.rules.registry import RuleRequest
from kohya_bucket.buckets.sizes import as_resolution, as_whole, check_steps
from kohya_bucket.errors import BucketSettingsError


def token_band_sizes(
    area: int, tolerance: float, min_size: int, max_size: int, reso_steps: int
) -> list[tuple[int, int]]:
    """All (width, height) in steps with `abs(width * height - area) <= tolerance * area`, the nearest to `area` first.

    With sides in steps of a model's patch, tokens are pixels by a constant.
    """
    low, high = math.ceil(area * (1 - tolerance)), math.floor(area * (1 + tolerance))
    sizes = []
    first = -(-min_size // reso_steps) * reso_steps
    for width in range(first, min(max_size, high // first) + 1, reso_steps):
        shortest = max(first, -(-low // width // reso_steps) * reso_steps)
        sizes += [(width, height) for height in range(shortest, min(max_size, high // width) + 1, reso_steps)]
    return sorted(sizes, key=lambda size: (abs(size[0] * size[1] - area), size))


class TokenBandBuckets(FixedBuckets):
    """Nearest log aspect among all sizes whose tokens lie within a band around the resolution's.

    Of sizes with one aspect, the one whose tokens are nearest to the resolution's is taken.

    Args:
        max_reso: (width, height) in pixels, whose area is the middle of the band; an int means a square.
        tolerance: half the width of the band, as a share of the area, e.g. 0.05.
        min_size, max_size: shortest and longest side; the longest is twice the side of the square by default.
        reso_steps: every side is a multiple of this, e.g. 16, the pixels of a token of most transformers.
        of_set: the options of `FixedBuckets`.

    Raises:
        BucketSettingsError: values from which no bucket follows.
    """

    def __init__(
        self,
        max_reso: tuple[int, int] | int,
        tolerance: float = 0.05,
        min_size: int = 256,
        max_size: int | None = None,
        reso_steps: int = 16,
        **of_set: Any,
    ) -> None:
        width, height = as_resolution("resolution", max_reso)
        steps = check_steps(reso_steps)
        if not 0 <= tolerance < 1:
            raise BucketSettingsError(
                f"token_tolerance is {tolerance!r}, but is a share of the tokens: at least 0 and below 1, e.g. 0.05"
            )
        longest = 2 * math.isqrt(width * height) if max_size is None else as_whole("max_size", max_size)
        shortest = as_whole("min_size", min_size)
        sizes = token_band_sizes(width * height, tolerance, max(shortest, 1), longest, steps)
        if not sizes:
            raise BucketSettingsError(
                f"no size in steps of {steps} with sides of {shortest} to {longest} has the tokens of {width}x{height} "
                f"within {tolerance:.0%}: raise token_tolerance, or lower the step"
            )
        name = f"token-band-{width}x{height}"
        text = f"tokens of {width}x{height} within {tolerance:.1%}, sides {shortest}..{longest} in steps of {steps}"
        made = BucketSet.from_dims(sizes, name=name, description=text)
        super().__init__(made, **of_set)
        self.tolerance = tolerance


def token_band_rule(request: RuleRequest) -> TokenBandBuckets:
    """`token_band`."""
    limits = request.min_size, request.max_size, request.reso_steps
    return TokenBandBuckets(request.max_reso, request.token_tolerance, *limits, **request.set_options)
