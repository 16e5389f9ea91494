"""Which images may be trained in another bucket than their own, whichever the epoch and the seed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placed import PlacedDataset

__all__ = ["moved_images"]


def moved_images(
    images: PlacedDataset, options: AdapterOptions, world_sizes: Iterable[int]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """([M] image, [M] bucket): what `merge` and `catch_all` may train elsewhere, image and size once each.

    Sizes at which an image is trained anyway, with several resolutions, are not among them.

    Args:
        images: one dataset.
        options: the `[kohya_bucket]` table.
        world_sizes: numbers of processes to train with. Without `same_shape`, the plan does not depend on them.
    """
    image, bucket = images.pairs
    planner = GroupPlanner([images], options)
    ranks = set(world_sizes) if options.same_shape else {1}
    pairs = sorted({pair for n in ranks for pair in planner.planner(n).moved_pairs()})
    if not pairs:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int32)
    asked = [image[bucket == source] for source, _ in pairs]
    moved = np.concatenate(asked)
    target = np.repeat(np.array([target for _, target in pairs], dtype=np.int32), [len(rows) for rows in asked])
    sizes = np.array(images.buckets, dtype=np.int64)
    _, size_number = np.unique(sizes, axis=0, return_inverse=True)
    size_number = size_number.reshape(-1)  # numpy 2.0 gives it another shape
    keys, first = np.unique(moved * len(sizes) + size_number[target], return_index=True)
    at = first[~np.isin(keys, image * len(sizes) + size_number[bucket])]
    return moved[at], target[at]
