"""Alpha masks in a batch: only of images whose subset asks for them.

Cached latents keep the mask of a run that wanted it, and are shared by data sets of which one may want it. sd-scripts
since 0.10 trains with every mask that it finds in a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kohya_bucket.sdscripts.objects import Subset

__all__ = ["drop_unwanted_masks"]


def drop_unwanted_masks(batch: Any, keys: Sequence[str], subset_of: Mapping[str, Subset]) -> Any:
    """The batch of these images, in this order, without the masks that nobody asked for.

    An image without a mask beside others with one counts whole, as in sd-scripts: its mask is all ones.
    """
    masks = batch.get("alpha_masks") if isinstance(batch, dict) else None
    if masks is None:
        return batch
    wanted = [bool(subset_of[key].alpha_mask) for key in keys]
    if all(wanted):
        return batch
    if any(wanted):
        masks = masks.clone()
        masks[[i for i, yes in enumerate(wanted) if not yes]] = 1
    return batch | {"alpha_masks": masks if any(wanted) else None}
