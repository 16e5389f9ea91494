"""merge: a bucket's remainder is trained in the next best bucket, as long as little enough is cropped off."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.ledger import LedgerReason
from kohya_bucket.planning.policy import RemainderContext, RemainderPolicy, moved_to
from kohya_bucket.planning.rotation import take_in_rotation

__all__ = ["MERGE"]


def _merge(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Change]]:
    """Move remainders, in rotation, to the bucket that crops off least of them; nothing is lost.

    Buckets are taken from the fewest images to the most. A bucket whose remainder has moved is settled: it
    takes in nothing more, so every move leaves one short batch fewer. Where no other bucket is within
    `max_crop`, the remainder stays as a short batch. Images that must not be enlarged go to buckets no larger in
    either side, and pixels that scaling takes from them count like those that are cropped off.
    """
    target, moved = _targets(demand.per_bucket(), context)
    rows = take_in_rotation(demand, moved, context.seed, context.epoch)
    return moved_to(demand, rows, target[demand.bucket[rows]])


def _targets(
    counts: npt.NDArray[np.int64], context: RemainderContext
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """([K] where each bucket's remainder goes, [K] how many images of its own go there).

    A bucket may pass on no more than its own images: what it takes in before it is settled counts towards its
    full batches first.
    """
    aspects = context.sizes[:, 0] / np.maximum(context.sizes[:, 1], 1)
    areas = context.sizes.astype(np.int64).prod(axis=1)
    held = counts.copy()
    target = np.arange(len(counts), dtype=np.int32)
    moved = np.zeros(len(counts), dtype=np.int64)
    open_ = counts > 0
    for k in sorted(np.flatnonzero(open_).tolist(), key=lambda b: (counts[b], b)):
        remainder = int(held[k] % context.global_batch[k])
        open_[k] = False
        if remainder == 0 or remainder > counts[k]:
            continue
        crop = 1 - np.minimum(aspects / aspects[k], aspects[k] / aspects)
        if context.no_upscale[k]:
            crop = 1 - areas / areas[k]
        allowed = open_ & (context.groups == context.groups[k]) & context.fits(k)
        near = np.flatnonzero(allowed & (crop <= context.max_crop))
        if len(near) == 0:
            continue
        best = int(near[np.argmin(crop[near])])
        target[k], moved[k] = best, remainder
        held[k] -= remainder
        held[best] += remainder
    return target, moved


MERGE = RemainderPolicy(
    "merge",
    "trains them in the next best bucket",
    _merge,
    LedgerReason.MERGED,
    moves_images=True,
    needs_sizes="the crop into another bucket depends on them",
    heeds_max_crop=True,
)
