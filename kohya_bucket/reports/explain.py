"""Why one image lands in its bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kohya_bucket.buckets import Bucket, BucketRule
from kohya_bucket.buckets.geometry import cut_pixels
from kohya_bucket.buckets.switching import switching_points

__all__ = ["Explanation", "Neighbour", "explain"]


@dataclass(frozen=True)
class Neighbour:
    """A bucket next to the image's, in order of aspect.

    Attributes:
        distance: |bucket aspect - image aspect|.
        switch: image aspect (width / height) at which the two hand over, or None.
        crop_loss: what this bucket would crop off.
    """

    bucket: Bucket
    distance: float
    switch: float | None
    crop_loss: float


@dataclass(frozen=True)
class Explanation:
    """What happens to one image. Sizes are (width, height) in pixels; `cut` is left, top, right, bottom.

    `bucket` is None where there is none, and `reason` says why. `neighbours` are the next narrower and the next
    wider bucket; empty where buckets follow from the images.
    """

    size: tuple[int, int]
    bucket: Bucket | None
    reason: str
    resized: tuple[int, int]
    cut: tuple[int, int, int, int]
    crop_loss: float
    scale: float
    distance: float
    exact: bool
    neighbours: tuple[Neighbour, ...]

    @property
    def aspect(self) -> float:
        """Width / height of the image."""
        return self.size[0] / self.size[1]


def explain(rule: BucketRule, width: int, height: int) -> Explanation:
    """Place one image and look around its bucket.

    Raises:
        ValueError: a side below 1.
    """
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} is not an image size: both sides must be 1 or more")
    placement = rule.place([(width, height)])
    bucket = placement.bucket(0)
    if bucket is None:
        reason = placement.reason(0).text
        return Explanation((width, height), None, reason, (0, 0), (0, 0, 0, 0), 0.0, 0.0, 0.0, False, ())
    resized = placement.resized_sizes[0].tolist()
    cut = cut_pixels(placement.resized_sizes, placement.bucket_sizes)[0].tolist()
    return Explanation(
        size=(width, height),
        bucket=bucket,
        reason="",
        resized=(resized[0], resized[1]),
        cut=(cut[0], cut[1], cut[2], cut[3]),
        crop_loss=float(placement.crop_loss[0]),
        scale=resized[0] / width,
        distance=abs(float(placement.aspect_errors[0])),
        exact=bucket.as_tuple() == (width, height),
        neighbours=_neighbours(rule, bucket, width / height),
    )


def _neighbours(rule: BucketRule, bucket: Bucket, aspect: float) -> tuple[Neighbour, ...]:
    bucket_set = rule.bucket_set
    if bucket_set is None or bucket not in bucket_set:
        return ()
    points = switching_points(bucket_set, getattr(rule, "switching", "midpoint"))
    switches = {frozenset((p.narrower, p.wider)): p.aspect for p in points}
    order = sorted(bucket_set, key=lambda b: (b.aspect_ratio, b.pixel_count))
    at = order.index(bucket)
    found = []
    for other in order[max(at - 1, 0) : at] + order[at + 1 : at + 2]:
        loss = 1 - min(other.aspect_ratio / aspect, aspect / other.aspect_ratio)
        distance = float(np.abs(other.aspect_ratio - aspect))
        found.append(Neighbour(other, distance, switches.get(frozenset((bucket, other))), loss))
    return tuple(found)
