"""Where every image gets its bucket and its crop: the plan, both trainers, the datasets and the reports ask here."""

from __future__ import annotations

import numpy.typing as npt

from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.rule import BucketRule
from kohya_bucket.buckets.sizes import FloatArray


def place(rule: BucketRule, sizes: npt.ArrayLike, focus: FloatArray | None = None) -> Placement:
    """The placement of N images by `rule`, with the crops that keep each focus.

    Args:
        sizes: [N, 2] (width, height); rows with a side below 1 are unreadable.
        focus: [N, 4] shares, NaN where an image has no focus; None: none has one.
    """
    return focused(rule.place(sizes), focus)
