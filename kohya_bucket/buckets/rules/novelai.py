"""NovelAI's rule: its published bucket set, nearest aspect, images of extreme aspect pruned.

Source: "NovelAI Improvements on Stable Diffusion" and the program published with it
(NovelAI/novelai-aspect-ratio-bucketing, 2022); the two agree. The epoch is in `kohya_bucket.originals.novelai_epochs`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import InSet
from kohya_bucket.buckets.rules.fixed import FixedBuckets
from kohya_bucket.buckets.rules.registry import RuleRequest
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_resolution
from kohya_bucket.buckets.switching import AspectSwitch
from kohya_bucket.errors import BucketSettingsError


def novelai_bucket_sizes(
    max_size: tuple[int, int], divisible: int, min_dim: int, base_res: tuple[int, int], dim_limit: int
) -> tuple[list[tuple[int, int]], bool]:
    """The sizes in the program's order, and whether the base size was added by hand.

    For each width from `min_dim` in steps the tallest height whose area is within `max_size`'s and whose side is
    within `dim_limit`, then the same with the sides swapped; and the base size, if it is on the way to one of the
    former. Sorted by width, then by descending height.
    """
    area = max_size[0] * max_size[1]
    tallest = {}
    # a wider one would have no height within the area, however large `dim_limit` is
    for side in range(min_dim, min(dim_limit, area // min_dim) + 1, divisible):
        tallest[side] = min_dim + max(0, (min(area // side, dim_limit) - min_dim) // divisible) * divisible
    sizes = set(tallest.items()) | {(h, w) for w, h in tallest.items()}
    passed = range(min_dim, tallest.get(base_res[0], min_dim), divisible)
    by_hand = base_res[1] in passed and base_res not in sizes
    if by_hand:
        sizes.add(base_res)
    return sorted(sizes, key=lambda s: s[0] * 4096 - s[1]), by_hand


class NovelAIBuckets(FixedBuckets):
    """Smallest `|aspect - image aspect|` in NovelAI's set; an error of `max_ar_error` or more prunes the image.

    The arguments have the program's names and defaults. As there, only the aspect decides, also for an image of
    exactly a bucket's size, and a base size that was added by hand counts as square whatever it is.

    Args:
        max_size: (width, height) whose area no bucket exceeds; an int means a square.
        divisible: step between sides.
        min_dim: shortest side. dim_limit: longest side.
        base_res: the size of the catch-all batches; it joins the set.
        max_ar_error: aspect distance from which an image has no bucket (`Reason.ASPECT_ERROR`).
        switching: `midpoint` is NovelAI's; see `kohya_bucket.buckets.switching_points`.
        limits: the other options of `FixedBuckets`.

    Raises:
        BucketSettingsError: values from which no bucket follows.

    Examples:
        >>> rule = NovelAIBuckets()
        >>> rule.assign(1920, 1080)
        Bucket(width=832, height=448)
        >>> rule.place([(9000, 1000)]).reason(0).text
        'its aspect is further from every bucket than the limit allows'
    """

    def __init__(
        self,
        max_size: tuple[int, int] | int = (768, 512),
        divisible: int = 64,
        min_dim: int = 256,
        base_res: tuple[int, int] = (512, 512),
        dim_limit: int = 1024,
        max_ar_error: float = 4,
        *,
        switching: str = "midpoint",
        **limits: Any,
    ) -> None:
        width, height = as_resolution("max_size", max_size)
        if min(width, height, divisible, min_dim) < 1 or max_ar_error <= 0:
            raise BucketSettingsError(
                f"max_size {width}x{height}, divisible {divisible}, min_dim {min_dim} and max_ar_error {max_ar_error} "
                f"must all be positive"
            )
        self.base_res = (int(base_res[0]), int(base_res[1]))
        self.max_ar_error = max_ar_error
        sizes, by_hand = novelai_bucket_sizes((width, height), divisible, min_dim, self.base_res, dim_limit)
        if not sizes:
            raise BucketSettingsError(
                f"no bucket has sides of {min_dim}..{dim_limit} and at most {width}x{height} pixels: "
                f"lower min_dim or raise max_size"
            )
        bucket_set = BucketSet.from_dims(
            sizes,
            name=f"novelai-{width}x{height}",
            description=f"NovelAI, sides {min_dim}..{dim_limit} in steps of {divisible}",
        )
        super().__init__(bucket_set, switching=switching, **limits)
        self.aspects: FloatArray = bucket_set.aspects
        """[K] float64 aspects that the distance is taken to, in set order."""
        if by_hand and self.base_res[0] != self.base_res[1]:
            self.aspects = self.aspects.copy()
            self.aspects[sizes.index(self.base_res)] = 1.0
            if switching == "midpoint":
                self._switch = AspectSwitch.nearest(self.aspects)

    def _assign(self, sizes: IntArray) -> InSet:
        index = np.empty(len(sizes), dtype=np.int32)
        reasons = np.empty(len(sizes), dtype=np.uint8)

        def work(start: int, stop: int) -> None:
            width, height = (sizes[start:stop, side].astype(np.float64) for side in (0, 1))
            unreadable = np.minimum(width, height) < 1
            width[unreadable] = height[unreadable] = 1
            aspect = width / height
            at = self._switch.index(aspect)
            pruned = np.abs(self.aspects[at] - aspect) >= self.max_ar_error
            at[pruned | unreadable] = -1
            index[start:stop] = at
            reasons[start:stop] = np.where(pruned, np.uint8(Reason.ASPECT_ERROR), np.uint8(Reason.PLACED))
            reasons[start:stop][unreadable] = Reason.UNREADABLE

        for_chunks(len(sizes), work)
        if self._limits.active:
            self._limits.apply(sizes, index, reasons)
        return InSet(sizes, self.bucket_set, index, reasons)


def novelai_rule(request: RuleRequest) -> NovelAIBuckets:
    """`novelai`, with the square of the resolution's area as base size."""
    width, height = request.max_reso
    side = math.isqrt(width * height) // request.reso_steps * request.reso_steps
    return NovelAIBuckets(
        request.max_reso, request.reso_steps, request.min_size, (side, side), request.max_size, **request.set_options
    )
