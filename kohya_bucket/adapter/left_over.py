"""What is said of images in buckets that never fill a global batch, before a run is begun."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.planning.planner import never_full, never_trained
from kohya_bucket.texts import counted, some

__all__ = ["LeftOver", "left_over"]

_SHOWN = 5


@dataclass(frozen=True)
class LeftOver:
    """Where the remainder is left out: what becomes of buckets that it would leave out whole.

    Attributes:
        never_trained: file names of the images that no epoch trains.
        line: for logs and tables; empty where every bucket fills a batch, or nothing is left out.
    """

    never_trained: tuple[str, ...]
    line: str


def left_over(group: GroupPlanner, world_size: int) -> LeftOver:
    """What a group's plans leave over on so many processes."""
    planner = group.planner(world_size)
    if not planner.options.policy.leaves_out:
        return LeftOver((), "")
    small = never_full(planner)
    if not len(small):
        return LeftOver((), "")
    buckets = np.unique(group.bucket_sizes[small], axis=0).tolist()
    where = some([f"{width}x{height}" for width, height in buckets], _SHOWN)
    policy, remainder = planner.options.policies[-1], group.options.remainder
    if policy.leaves_out:
        names = tuple(group.name_of(image) for image in never_trained(planner).tolist())
        count = counted(len(names), "image", "is", "are")
        return LeftOver(
            names,
            f"{count} never trained ({some(names, _SHOWN)}): what {where} hold fills no batch of "
            f"{counted(world_size, 'process')}, and small_buckets = '{policy.name}'; small_buckets = 'keep' "
            "trains them",
        )
    images = np.isin(planner.demand_model.ids, small)
    held = int(np.count_nonzero(images if images.ndim == 1 else images.any(axis=1)))
    return LeftOver(
        (),
        f"{counted(held, 'image')} in buckets that fill no batch of {world_size} process"
        f"{'es' * (world_size > 1)} ({where}), which remainder = '{remainder}' would never train: "
        f"small_buckets = '{policy.name}' {policy.text}",
    )
