"""What an epoch is on several GPUs: steps, waiting, repeats, and images that fill no batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.planning.idle import dealt_costs, idle_share, idle_share_of
from kohya_bucket.planning.planner import never_full, never_trained
from kohya_bucket.texts import counted, some

_SHOWN = 5


def left_over(group: GroupPlanner, world_size: int) -> tuple[tuple[str, ...], str]:
    """What becomes of buckets that a remainder policy would leave out whole, on so many processes.

    Returns the file names of the images that no epoch trains, and a line for logs and tables; empty where every bucket
    fills a batch, or nothing is left out.
    """
    planner = group.planner(world_size)
    small = never_full(planner) if planner.options.policy.leaves_out else ()
    if not len(small):
        return (), ""
    together = counted(world_size if planner.options.same_shape is True else 1, "process")
    buckets = np.unique(group.bucket_sizes[small], axis=0).tolist()
    where = some([f"{width}x{height}" for width, height in buckets], _SHOWN)
    policy, remainder = planner.options.policies[-1], group.options.remainder
    if policy.leaves_out:
        names = tuple(group.name_of(image) for image in never_trained(planner).tolist())
        count = counted(len(names), "image", "is", "are")
        return names, (
            f"{count} never trained ({some(names, _SHOWN)}): what {where} hold fills no batch of {together}, and "
            f"small_buckets = '{policy.name}'; small_buckets = 'keep' trains them"
        )
    images = np.isin(planner.demand_model.ids, small)
    held = int(np.count_nonzero(images if images.ndim == 1 else images.any(axis=1)))
    return (), (
        f"{counted(held, 'image')} in buckets that fill no batch of {together} ({where}), which remainder = "
        f"'{remainder}' would never train: small_buckets = '{policy.name}' {policy.text}"
    )


@dataclass(frozen=True)
class GpuRow:
    """An epoch on a number of GPUs.

    Attributes:
        steps: batches that each GPU trains; updates: changes of the weights, fewer with accumulation.
        samples: trainings by all GPUs together.
        missed, repeated, moved: trainings other than asked, or in another bucket; `ledger` says it in words.
        idle: predicted share of the GPUs' time spent waiting for the one with the most to do.
        left_over: what becomes of buckets that never fill a batch, in words; `never_trained` names the images that no
            epoch trains.
        idle_independent: the same if every GPU drew batches of its own, as trainers do alone.
    """

    gpus: int
    steps: int
    updates: int
    samples: int
    missed: int
    repeated: int
    moved: int
    idle: float
    idle_independent: float
    ledger: str
    left_over: str
    never_trained: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def gpu_rows(planner: GroupPlanner, gpus: Sequence[int], accumulate: int = 1) -> tuple[GpuRow, ...]:
    """Plan an epoch on each number of GPUs; `accumulate` batches make one update."""
    alone, rows = planner.planner(1).plan(0, 1), []
    own = not planner.options.same_shape  # each GPU has batches of its own
    for n in gpus:
        ranks, independent = 1 if own else n, idle_share(dealt_costs(alone, n))
        plan = planner.planner(ranks).plan(0, 1)
        ledger, steps = plan.ledger(), -(-plan.steps // n) if own else plan.steps
        never, line = left_over(planner, ranks)
        idle = independent if own else idle_share_of(plan)
        rows.append(
            GpuRow(
                n, steps, -(-steps // accumulate), plan.samples, ledger.missed, ledger.repeated, ledger.moved, idle,
                independent, ledger.text, line, never,
            )
        )  # fmt: skip
    return tuple(rows)
