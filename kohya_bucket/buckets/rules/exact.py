"""lopho's rule: buckets keyed by the exact integer size, made from the images themselves.

Source: the pull request "Simpler bucketing code" (#59, harubaru/waifu-diffusion, December 2022): its text and
comments; the listing in it has two slips (an inverted scale, a height computed from the width).
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.limits import check_max_crop
from kohya_bucket.buckets.no_upscale import Admissible, largest_sizes
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import OwnSizes, RuleBase
from kohya_bucket.buckets.rules.registry import RuleRequest
from kohya_bucket.buckets.sizes import IntArray, as_resolution, as_whole, positive, size_keys, sizes_of_keys
from kohya_bucket.checks import as_flag, one_of
from kohya_bucket.errors import BucketSettingsError

# Up to here every product of the integer arithmetic fits into 64 bits for sides of up to 2**31 pixels.
_LARGEST_AREA = 2**29


class ExactBuckets(RuleBase):
    """One bucket per size. No float decides a key, so every machine makes the same buckets.

    Args:
        max_area: pixels that no resized image exceeds; `(width, height)` or an int side stand for their area.
        divisor: every side is a multiple of this.
        resize: scale each image to its optimal size, the multiple of `divisor` that fills the area at the
            image's aspect; otherwise take sizes as they are, which must be multiples (`Reason.NOT_A_MULTIPLE`).
        min_side: shortest side; by default the divisor. A resized size is moved to the limit; where that would
            enlarge against `no_upscale`, or sizes are taken as they are, there is none (`Reason.SIDE_LIMIT`).
        max_side: longest side; by default what the area leaves beside `min_side`.
        no_upscale: with `resize`, never enlarge an image in either side.
        max_crop: with `resize`, the largest share of an image that may be cropped off; above it an image moves
            to the largest size within it, or has no bucket (`Reason.CROP_LIMIT`).
        batch_size: what `underfilled` counts against.
        underfilled: what happens to buckets with fewer images than a batch: `keep`; `redistribute`, each image
            to the bucket next to it by Manhattan distance of the sizes (only with `resize`); or `drop`
            (`Reason.UNDERFILLED`; the count is `(placement.reasons == Reason.UNDERFILLED).sum()`).

    Raises:
        BucketSettingsError: values that contradict each other or from which no size follows.

    Examples:
        >>> rule = ExactBuckets(1024, divisor=32)
        >>> rule.place([(4000, 3000), (640, 480)]).bucket_sizes.tolist()
        [[1152, 864], [1152, 864]]
    """

    def __init__(
        self,
        max_area: tuple[int, int] | int = (512, 512),
        divisor: int = 64,
        *,
        resize: bool = True,
        min_side: int | None = None,
        max_side: int | None = None,
        no_upscale: bool = False,
        max_crop: float | None = None,
        batch_size: int = 1,
        underfilled: str = "keep",
    ) -> None:
        width, height = as_resolution("max_area", max_area)
        self.max_area = width * height
        self.divisor = as_whole("divisor", divisor)
        if min(width, height, self.divisor) < 1 or not self.divisor**2 <= self.max_area <= _LARGEST_AREA:
            raise BucketSettingsError(
                f"an area of {width}x{height} with divisor {divisor} allows no size: the area must hold at least one "
                f"square of the divisor and at most {_LARGEST_AREA} pixels"
            )
        self.min_side = self.divisor if min_side is None else int(min_side)
        longest = self.max_area // max(self.min_side, 1) // self.divisor * self.divisor
        self.max_side = longest if max_side is None else int(max_side)
        self.resize = as_flag("resize", resize, BucketSettingsError)
        self.no_upscale = as_flag("no_upscale", no_upscale, BucketSettingsError)
        self.max_crop = check_max_crop(max_crop)
        self.batch_size, self.underfilled = int(batch_size), underfilled
        self._check(min_side is not None or max_side is not None)

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image, before any redistribution. `ValueError` with the reason if it has none."""
        alone = copy.copy(self)
        alone.underfilled = "keep"
        return RuleBase.assign(alone, width, height)

    def _assign(self, sizes: IntArray) -> OwnSizes:
        bucket_sizes, reasons = np.empty_like(sizes), np.empty(len(sizes), dtype=np.uint8)

        def work(start: int, stop: int) -> None:
            bucket_sizes[start:stop], reasons[start:stop] = self._optimal(sizes[start:stop])

        for_chunks(len(sizes), work)
        if self.underfilled != "keep":
            limit = sizes if self.no_upscale else None
            settle_underfilled(bucket_sizes, reasons, self.batch_size, self.underfilled == "redistribute", limit)
        return OwnSizes(sizes, bucket_sizes, reasons, self.divisor)

    def _optimal(self, sizes: IntArray) -> tuple[IntArray, npt.NDArray[np.uint8]]:
        unreadable = np.minimum(sizes[:, 0], sizes[:, 1]) < 1
        if unreadable.any():
            sizes = np.where(unreadable[:, None], self.divisor, sizes).astype(np.int32)
        reasons = np.zeros(len(sizes), dtype=np.uint8)
        if self.resize:
            buckets = optimal_sizes(sizes, self.max_area, self.divisor, self.no_upscale, self.min_side, self.max_side)
            reasons[buckets[:, 0] < 1] = Reason.TOO_SMALL
            if self.no_upscale and self.min_side > self.divisor:
                reasons[(buckets[:, 0] < 1) & (sizes.min(axis=1) >= self.divisor)] = Reason.SIDE_LIMIT
            if self.max_crop is not None:
                self._bound_crop(sizes, buckets, reasons)
        else:
            buckets = sizes.copy()
            outside = (sizes.min(axis=1) < self.min_side) | (sizes.max(axis=1) > self.max_side)
            reasons[outside] = Reason.SIDE_LIMIT
            reasons[(sizes % self.divisor).any(axis=1)] = Reason.NOT_A_MULTIPLE
        reasons[unreadable] = Reason.UNREADABLE
        buckets[reasons != Reason.PLACED] = 0
        return buckets, reasons

    def _bound_crop(self, sizes: IntArray, buckets: IntArray, reasons: npt.NDArray[np.uint8]) -> None:
        at = np.flatnonzero(reasons == Reason.PLACED)
        loss = geometry.crop_loss(*buckets[at].T, *geometry.covering_sizes(sizes[at], buckets[at]).T)
        at = at[loss > (self.max_crop or 0.0)]
        admissible = Admissible(self.max_area, self.divisor, self.no_upscale, self.min_side, self.max_side)
        buckets[at] = largest_sizes(sizes[at], admissible, np.ones(len(at)), self.max_crop)
        reasons[at[buckets[at, 0] < 1]] = Reason.CROP_LIMIT

    def _check(self, limits_given: bool) -> None:
        d, low, high = self.divisor, self.min_side, self.max_side
        if limits_given and (low < 1 or low % d or high % d or not low <= high or low * low > self.max_area):
            raise BucketSettingsError(
                f"sides of {low}..{high} do not work with divisor {d} and {self.max_area} pixels: both must be "
                f"multiples of the divisor, in order, and a square of the shortest side must fit into the area"
            )
        one_of("underfilled", self.underfilled, ("keep", "redistribute", "drop"), BucketSettingsError)
        positive(batch_size=self.batch_size)
        if not self.resize and (self.underfilled == "redistribute" or self.max_crop is not None or self.no_upscale):
            raise BucketSettingsError(
                "with resize=False sizes are taken as they are, so redistribute, max_crop and no_upscale, which change "
                "them, cannot be set: resize, or drop under-filled buckets"
            )

    def __repr__(self) -> str:
        return (
            f"ExactBuckets(max_area={self.max_area}, divisor={self.divisor}, sides={self.min_side}..{self.max_side}, "
            f"resize={self.resize}, no_upscale={self.no_upscale}, underfilled={self.underfilled!r})"
        )


def exact_rule(request: RuleRequest) -> ExactBuckets:
    """`exact`; without upscaling the limits of the sides do not count, as in sd-scripts."""
    free = request.no_upscale
    return ExactBuckets(
        request.max_reso, request.reso_steps, no_upscale=request.no_upscale, max_crop=request.max_crop,
        min_side=None if free else request.min_size, max_side=None if free else request.max_size,
    )  # fmt: skip


Ints = npt.NDArray[np.int64]


def optimal_sizes(
    sizes: IntArray, max_area: int, divisor: int, no_upscale: bool = False,
    min_side: int = 1, max_side: int | None = None,
) -> IntArray:  # fmt: skip
    """[N, 2] positive sizes -> [N, 2] int32 multiples of `divisor`; 0 where a side rounds to nothing.

    With scale = sqrt(max_area / (w * h)), each side is `round(side * scale / divisor) * divisor`; if the area then
    exceeds `max_area`, both are floored instead. `side * scale / divisor` is the root of the fraction
    `max_area * side / (other side * divisor**2)`, so integer roots decide, and half rounds to even as in Python.
    A side outside the limits moves to the limit, and the other one into the area that is left.
    """
    width, height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
    unit_area = divisor * divisor
    (rounded_w, floored_w), (rounded_h, floored_h) = (
        _root_of_fraction(max_area * side, other * unit_area) for side, other in ((width, height), (height, width))
    )
    over = rounded_w * rounded_h * unit_area > max_area
    units_w, units_h = np.where(over, floored_w, rounded_w), np.where(over, floored_h, rounded_h)
    if no_upscale:
        small, own_w, own_h = width * height <= max_area, width // divisor, height // divisor
        units_w = np.where(small, own_w, np.minimum(units_w, own_w))
        units_h = np.where(small, own_h, np.minimum(units_h, own_h))
    vanished = np.minimum(units_w, units_h) < 1
    low = max(min_side // divisor, 1)
    high = max_area // unit_area if max_side is None else max_side // divisor
    if low > 1 or high * low < max_area // unit_area:
        units_w, units_h = _within_limits(units_w, units_h, low, high, max_area // unit_area)
    out = np.empty((len(sizes), 2), dtype=np.int32)
    out[:, 0], out[:, 1] = units_w * divisor, units_h * divisor
    if no_upscale:
        vanished |= (out > sizes).any(axis=1)
    out[vanished] = 0
    return out


def _within_limits(units_w: Ints, units_h: Ints, low: int, high: int, most: int) -> tuple[Ints, Ints]:
    """Both sides moved to the limits, and the longer one into the `most` units of area that are left."""
    units_w, units_h = np.clip(units_w, low, high), np.clip(units_h, low, high)
    wide = units_w > units_h
    return (
        np.where(wide, np.minimum(units_w, most // units_h), units_w),
        np.where(wide, units_h, np.minimum(units_h, most // units_w)),
    )


def _root_of_fraction(numerator: Ints, denominator: Ints) -> tuple[Ints, Ints]:
    """`sqrt(numerator / denominator)`, rounded to the nearest whole number (half to even) and rounded down."""
    square = 4 * numerator // denominator  # of twice the root; below 2**62
    doubled = np.sqrt(square).astype(np.int64)
    doubled -= doubled * doubled > square  # the float root is off by one at most
    doubled += (doubled + 1) * (doubled + 1) <= square
    rounded = (doubled + 1) >> 1
    rounded -= (doubled & 3 == 1) & (doubled * doubled * denominator == 4 * numerator)
    return rounded, doubled >> 1


def settle_underfilled(
    bucket_sizes: IntArray, reasons: npt.NDArray[np.uint8], batch_size: int, redistribute: bool,
    limit: IntArray | None = None,
) -> None:  # fmt: skip
    """Change decisions in place until every bucket holds at least a batch. The order of images decides nothing.

    The smallest bucket is dissolved first (of equally small ones the narrowest, then the lowest): each of its
    images moves to the remaining bucket next to the one it had at first, by Manhattan distance (of equally distant
    ones the largest area, then the narrowest). What cannot move, or would stay below a batch in the last bucket,
    loses its bucket (`Reason.UNDERFILLED`).

    Args:
        bucket_sizes: [N, 2] int32; rows whose reason is not `PLACED` are left alone.
        limit: [N, 2] sizes that a bucket must not exceed in either side (for no upscaling).
    """
    placed = np.flatnonzero(reasons == Reason.PLACED)
    first = bucket_sizes[placed].astype(np.int64)
    # Sorted by (width, height), so that the first of equals is the narrowest, then the lowest.
    keys, bucket_of = np.unique(size_keys(first), return_inverse=True)
    buckets = sizes_of_keys(keys).astype(np.int64)
    counts = np.bincount(bucket_of, minlength=len(buckets))
    if not redistribute:  # then no bucket gains what another loses
        bucket_of = np.where(counts[bucket_of] < batch_size, -1, bucket_of)
    alive = np.full(len(buckets), redistribute, dtype=np.bool_)
    areas = buckets.prod(axis=1)
    while len(small := np.flatnonzero(alive & (counts < batch_size))):
        smallest = small[np.argmin(counts[small])]
        rows = np.flatnonzero(bucket_of == smallest)
        alive[smallest], counts[smallest] = False, 0
        targets = np.flatnonzero(alive)
        bucket_of[rows] = -1
        if not len(targets):
            continue
        # Largest area first, so that the first of the smallest distances is the one wanted.
        targets = targets[np.argsort(-areas[targets], kind="stable")]
        distance = np.abs(first[rows, None, :] - buckets[None, targets, :]).sum(axis=2)
        if limit is not None:
            fits = (buckets[None, targets, :] <= limit[placed[rows], None, :]).all(axis=2)
            distance = np.where(fits, distance, np.iinfo(np.int64).max)
        best = distance.argmin(axis=1)
        possible = distance[np.arange(len(rows)), best] < np.iinfo(np.int64).max
        bucket_of[rows[possible]] = targets[best[possible]]
        counts += np.bincount(targets[best[possible]], minlength=len(buckets))
    lost = bucket_of < 0
    bucket_sizes[placed] = np.where(lost[:, None], 0, buckets[bucket_of])
    reasons[placed[lost]] = Reason.UNDERFILLED
