"""Epochs of very large datasets: plans without a table of images in memory, which open at once.

Images lie on disk sorted by bucket. Which image stands where in a bucket is computed by a permutation with a key, such
as Grain's index shuffle; which bucket comes when is drawn in blocks of steps. So any batch is found without those
before it, and what a run has trained is a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import integer, one_of, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.images.bucket_index import BucketIndex
from kohya_bucket.planning.fingerprint import digest_of
from kohya_bucket.planning.resume import EpochPosition
from kohya_bucket.planning.stream import Purpose, stream

_BLOCK: Final = 1 << 16  # steps that are drawn together
_ROUNDS: Final = 6


class _Steps:
    """In which order the steps of an epoch's part train buckets.

    The part is cut into blocks. Each has its share of every bucket's steps, at most one more or less than another, and
    an order of its own; so how many steps of a bucket lie before a block is computed, and not counted.

    Args:
        per_bucket: [K] steps of each bucket.
        key: seed, epoch and number of the part.
    """

    def __init__(self, per_bucket: npt.NDArray[np.int64], key: tuple[int, int, int]) -> None:
        self.per_bucket, self.total = per_bucket, int(per_bucket.sum())
        self._seed, self._epoch, self._part = key
        self._blocks = max(-(-self.total // _BLOCK), 1)
        draw = stream(Purpose.INDEXED_BLOCKS, self._seed, self._epoch, self._part)
        # without a phase of its own, what has one step would have it in the last block
        self._phase = draw.randint(0, self._blocks, len(per_bucket), dtype=np.int64)
        self._starts = np.array([int(self.before(block).sum()) for block in range(self._blocks + 1)])
        self._drawn = lru_cache(maxsize=2)(self._draw)

    def before(self, block: int) -> npt.NDArray[np.int64]:
        """[K] steps of each bucket in the blocks before one."""
        return (block * self.per_bucket + self._phase) // self._blocks

    def at(self, step: int) -> tuple[int, int]:
        """(bucket, how many steps of it come before) of a step."""
        block = int(np.searchsorted(self._starts, step, side="right")) - 1
        buckets, number = self._drawn(block)
        i = step - int(self._starts[block])
        return int(buckets[i]), int(number[i])

    def of(self, steps: int) -> npt.NDArray[np.int64]:
        """[K] how many of the first so many steps train each bucket."""
        block = min(int(np.searchsorted(self._starts, steps, side="right")) - 1, self._blocks - 1)
        some = self._drawn(block)[0][: steps - int(self._starts[block])]
        return self.before(block) + np.bincount(some, minlength=len(self.per_bucket))

    def _draw(self, block: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        first, counts = self.before(block), self.before(block + 1) - self.before(block)
        buckets = np.repeat(np.arange(len(counts)), counts)
        stream(Purpose.INDEXED_STEPS, self._seed, self._epoch, self._part * self._blocks + block).shuffle(buckets)
        number = np.empty(len(buckets), dtype=np.int64)
        order = np.argsort(buckets, kind="stable")
        number[order] = np.arange(len(buckets)) - np.repeat(np.cumsum(counts) - counts, counts)
        return buckets, number + first[buckets]


def permuted(at: npt.NDArray[np.int64], n: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Where a permutation of n numbers takes some of them, by a Feistel network; no table is made.

    Args:
        at: [M] numbers from 0 to n - 1.
        keys: one for each round.
    """
    half = np.uint64(max(((n - 1).bit_length() + 1) // 2, 1))
    mask = np.uint64((1 << int(half)) - 1)
    out = at.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):  # the network permutes up to 4 n numbers: what leaves n is taken on until it is back
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(32))) & mask)
        out[outside] = (left << half) | right
        outside = outside[out[outside] >= n]
    return out.astype(np.int64)


class IndexedPlan:
    """An epoch, or what is left of one: each step trains one bucket on all ranks.

    It trains what `plan_epoch` does with `step_shapes="one"` and the same remainder, in another order: images are drawn
    from their whole bucket as there, but the steps of a bucket are spread evenly over the epoch.

    Attributes:
        steps: batches of each rank.

    Args:
        index: the images.
        batch_size: images of a rank in a step.
        seed, epoch: what the order depends on.
        remainder: what becomes of images that fill no batch of all ranks: "keep" trains them, "drop" leaves out others
            in each epoch.

    Raises:
        PlanError: an argument is not what it must be.

    Examples:
        >>> index = BucketIndex(np.array([0, 2, 3, 5, 6, 1, 4]), np.array([0, 5, 7]))
        >>> plan = IndexedPlan(index, batch_size=2, world_size=2)
        >>> sorted(image for rank in (0, 1) for batch in plan.batches(rank) for image in batch.tolist())
        [0, 0, 1, 2, 3, 4, 5, 6]
        >>> rest = IndexedPlan(index, batch_size=2)  # on one rank
        >>> rest.load_state_dict(plan.state_dict(step=1))
        >>> plan.steps, rest.steps
        (3, 2)
    """

    def __init__(
        self, index: BucketIndex, batch_size: int, world_size: int = 1, *, seed: int = 0, epoch: int = 0,
        remainder: str = "keep",
    ) -> None:  # fmt: skip
        self.index, self.remainder = index, one_of("remainder", remainder, ("keep", "drop"))
        self.batch_size, self.world_size = whole("batch_size", batch_size, 1), whole("world_size", world_size, 1)
        self._begin_at(EpochPosition(integer("seed", seed), whole("epoch", epoch, 0)))

    def _begin_at(self, position: EpochPosition) -> None:
        parts = list(position.done)
        goes_on = bool(parts) and parts[-1].global_batch == self._global_batch
        last = parts.pop() if goes_on else None
        self._start, self._keys = position, dict[int, npt.NDArray[np.uint64]]()
        self._trained = np.zeros_like(self.index.counts)
        for number, part in enumerate(parts):
            size = int(np.max(part.global_batch))
            images = self._steps_of(size, number).of(part.steps) * size
            self._trained += np.minimum(images, self.index.counts - self._trained)
        self._steps, self._first = self._steps_of(self._global_batch, len(parts)), last.steps if last else 0
        self.steps = self._steps.total - self._first

    def _steps_of(self, size: int, part: int) -> _Steps:
        left = self.index.counts - self._trained
        per_bucket = left // size if self.remainder == "drop" else -(-left // size)
        return _Steps(per_bucket, (self._start.seed, self._start.epoch, part))

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.world_size

    def bucket(self, step: int) -> int:
        """The bucket that all ranks train in a step."""
        return self._steps.at(self._first + self._checked(step, self.steps - 1))[0]

    def indices(self, step: int, rank: int) -> npt.NDArray[np.int64]:
        """Image numbers of one rank in a step; where there are fewer images than ranks, the last ranks repeat some."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"there is no rank {rank} of {self.world_size}")
        bucket, number = self._steps.at(self._first + self._checked(step, self.steps - 1))
        begin = int(self._trained[bucket]) + number * self._global_batch
        n = int(self.index.counts[bucket])
        images = min(self._global_batch, n - begin)
        least, more = divmod(images, self.world_size)
        first, share = rank * least + min(rank, more), least + (rank < more)
        if not least:
            first, share = rank % images, 1
        at = permuted(begin + first + np.arange(share), n, self._keys_of(bucket))
        return np.asarray(self.index.images[int(self.index.starts[bucket]) + at], dtype=np.int64)

    def batches(self, rank: int, first: int = 0) -> Iterator[npt.NDArray[np.int64]]:
        """Those of one rank, from a step on; torch's `DataLoader` takes this as its `batch_sampler`."""
        return (self.indices(step, rank) for step in range(first, self.steps))

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where a run stands after so many steps of this plan: a few plain numbers."""
        before = self._start.step
        position = self._start.at_step(before + self._checked(step, self.steps), self._global_batch)
        return position.state_dict(self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Plan what a saved epoch has left, on any number of ranks and with any batch size.

        Raises:
            ResumeError: the state is damaged, or of other images.
        """
        self._begin_at(EpochPosition.from_state_dict(state, self._fingerprint))

    @property
    def _fingerprint(self) -> dict[str, Any]:
        return {"buckets": digest_of(self.index.counts), "remainder": self.remainder}

    def _keys_of(self, bucket: int) -> npt.NDArray[np.uint64]:
        if bucket not in self._keys:
            draw = stream(Purpose.INDEXED_IMAGES, self._start.seed, self._start.epoch, bucket)
            self._keys[bucket] = draw.randint(0, 1 << 63, _ROUNDS, dtype=np.uint64)
        return self._keys[bucket]

    def _checked(self, step: int, last: int) -> int:
        if not 0 <= step <= last:
            raise PlanError(f"there is no step {step}: the plan has {self.steps:,}")
        return step
