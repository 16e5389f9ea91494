"""What becomes of N clips: their items, the bucket of each, and what is not trained of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips.spans import Spans
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import IntArray

__all__ = ["ClipPlacement"]


@dataclass(frozen=True, repr=False)
class ClipPlacement:
    """N clips, of which M items are trained in K buckets.

    Attributes:
        picture: [N] where the frames go: size, resize and crop, as for an image.
        frames: [N] of each clip, at the rate it is trained at; 0 where it could not be read.
        spans: the M items: which clip, from which frame, how many.
        buckets: [K, 3] int32 width, height, frames of the buckets in use, sorted.
        bucket_index: [M] int32 positions in `buckets`.
        reasons: [N] uint8 values of `Reason`; `PLACED` where the clip has an item.
    """

    picture: Placement
    frames: npt.NDArray[np.int64]
    spans: Spans
    buckets: IntArray
    bucket_index: IntArray
    reasons: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def placed(self) -> npt.NDArray[np.bool_]:
        """[N] bool: at least one item is trained of the clip."""
        return np.asarray(self.reasons == Reason.PLACED)

    @property
    def items_per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] items in each bucket."""
        return np.bincount(self.bucket_index, minlength=len(self.buckets)).astype(np.int64)

    @property
    def items_per_clip(self) -> npt.NDArray[np.int64]:
        """[N] items of each clip."""
        return np.bincount(self.spans.clip, minlength=len(self)).astype(np.int64)

    @cached_property
    def kept(self) -> npt.NDArray[np.int64]:
        """[N] frames that at least one item has; the others of `frames` are dropped."""
        return self.spans.covered(len(self))

    def reason(self, i: int) -> Reason:
        """Why clip `i` is not trained (`Reason.PLACED` if it is)."""
        return Reason(int(self.reasons[i]))

    def __repr__(self) -> str:
        n, items = int(self.placed.sum()), len(self.spans)
        return f"<{type(self).__name__} n={len(self)} placed={n} items={items} n_buckets={len(self.buckets)}>"
