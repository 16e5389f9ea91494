"""Batches of nearly equal cost meet in a step, where a bucket has too few for all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.planning.batches import BatchLayout, split_batches
from kohya_bucket.planning.plan import MixedSteps, mixed_row

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EqualCost:
    """What came of a layout.

    Attributes:
        take: [T] where each image stood before.
        layout: steps of one bucket, then the mixed ones if there are any, as bucket K; of those, `turn` is the row in
            `mixed`.
        mixed: who trains what in those.
    """

    take: npt.NDArray[np.intp]
    layout: BatchLayout
    mixed: MixedSteps

    def numbered(self, steps: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """`bucket_of_step` of these steps."""
        bucket, last = self.layout.bucket[steps], len(self.layout.per_bucket) - 1
        if not self.mixed:
            return bucket
        return np.where(bucket == last, mixed_row(self.layout.turn[steps]), bucket).astype(np.int32)


def step_count(counts: Counts, global_batch: Counts, world_size: int) -> int:
    """Steps that `equal_cost` makes of [K] images at least."""
    rest = counts % global_batch
    rank_batches = -(-rest // (global_batch // world_size))
    pooled = rank_batches < world_size
    mixed_steps = -(-int(rank_batches[pooled].sum()) // world_size)
    return int((counts // global_batch).sum()) + int((~pooled).sum()) + mixed_steps


def equal_cost(
    cut: BatchLayout,
    global_batch: Counts,
    world_size: int,
    costs: npt.NDArray[np.float64],
    rng: np.random.RandomState | None,
    steps: int = 0,
) -> EqualCost:
    """Let batches of several buckets share a step where one bucket has too few for all ranks.

    Every step of a bucket that has a batch for each rank stays as it is. All others are cut into batches of one rank,
    which are sorted by cost; each step takes the next W of them. No other way to share these batches out has a lower
    sum of the steps' largest costs. Where their number does not divide by W, the largest are split in two; where they
    have too few images for that, a step of one bucket is cut up too. Only where that is not enough, ranks of the last
    step train one of its images again: fewer than W in an epoch.

    Args:
        cut: global batches, in order of their starts.
        global_batch: [K] images that fill one, a multiple of `world_size`.
        world_size: W.
        costs: [K] of one image.
        rng: mixes batches of equal cost; None leaves them in the order of their buckets.
        steps: at least so many are made, by splitting batches further.
    """
    # A global batch that has a batch for each rank stays a step of one bucket; all others go into a pool.
    n_buckets, per_rank = len(global_batch), global_batch // world_size
    rank_batches = -(-cut.length // per_rank[cut.bucket])
    pooled = rank_batches < world_size
    held = int(cut.length[pooled].sum())
    # The pool needs an image for each rank of its last step: if it is short of images, the longest step joins it,
    # provided it can spare as many beyond the one for each rank that its own batches need.
    if (missing := -(-int(rank_batches[pooled].sum()) // world_size) * world_size - held) > 0 and not pooled.all():
        longest = int(np.argmax(np.where(pooled, 0, cut.length)))
        pooled[longest] = cut.length[longest] - world_size >= missing
    # Cut the pool into batches of one rank; split these until there are W for each of its steps, and `steps` in all.
    pool = _rank_batches(cut, pooled, rank_batches, per_rank)
    mixed_steps = -(-len(pool.length) // world_size)
    one_bucket = BatchLayout.from_columns(cut.start[~pooled], cut.length[~pooled], cut.bucket[~pooled], n_buckets)
    kept = split_batches(one_bucket, steps - mixed_steps)
    mixed_steps = max(mixed_steps, steps - len(kept.length)) if len(pool.length) else 0
    pool = split_batches(pool, mixed_steps * world_size)
    # Sort the pool so that batches of nearly equal cost share a step; ties are drawn.
    order = np.arange(len(pool.length))
    if rng is not None:
        rng.shuffle(order)
    cost = costs[pool.bucket] * pool.length
    order = order[np.argsort(-cost[order], kind="stable")]
    mixed = _side_by_side(pool.length[order], pool.bucket[order], mixed_steps, world_size)
    length = np.concatenate([kept.length, mixed.length.sum(axis=1)]).astype(np.int32)
    layout = BatchLayout(
        np.cumsum(length, dtype=np.int64) - length,
        length,
        np.concatenate([kept.bucket, np.full(mixed_steps, n_buckets)]).astype(np.int32),
        np.concatenate([kept.turn, np.arange(mixed_steps)]),
        np.append(kept.per_bucket, mixed_steps) if mixed_steps else kept.per_bucket,
    )
    take = np.concatenate([runs(kept.length, kept.start), runs(pool.length[order], pool.start[order])])
    return EqualCost(take, layout, mixed)


def _rank_batches(cut: BatchLayout, rows: npt.NDArray[np.bool_], rank_batches: Counts, per_rank: Counts) -> BatchLayout:
    """Some global batches cut into batches of one rank."""
    times = rank_batches[rows]
    bucket = np.repeat(cut.bucket[rows], times)
    offset = runs(times) * per_rank[bucket]
    length = np.minimum(per_rank[bucket], np.repeat(cut.length[rows], times) - offset)
    return BatchLayout.from_columns(np.repeat(cut.start[rows], times) + offset, length, bucket, len(per_rank))


def _side_by_side(
    lengths: npt.NDArray[np.int32], buckets: npt.NDArray[np.int32], steps: int, world_size: int
) -> MixedSteps:
    """Batches dealt in order to steps, W to each, as long as one is left for every later step. A rank left over trains
    again what another of its step trains, so it has that one's bucket."""
    n, step = len(lengths), np.arange(steps)
    begins = np.minimum(step * world_size, n - (steps - step))
    step_of = np.searchsorted(begins, np.arange(n), side="right") - 1
    rank = np.arange(n) - begins[step_of]
    length = np.zeros((steps, world_size), dtype=np.int32)
    length[step_of, rank] = lengths
    batches_of_step = np.diff(np.append(begins, n))
    bucket = buckets[begins[:, None] + np.arange(world_size) % batches_of_step[:, None]] if n else np.zeros_like(length)
    return MixedSteps(length, bucket.astype(np.int32))
