"""NovelAI's epoch: trim, shard per rank, a catch-all at the base size, draws weighted by size.

Source: NovelAI/novelai-aspect-ratio-bucketing (2022). With the same seed the batches are those of the original
program, one for one: numpy's `RandomState` is a frozen stream, and the same numbers are taken from it in the same
order. Unlike `plan_epoch`, the ranks draw their buckets apart, so their shapes differ within a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import PlanError

Rows = npt.NDArray[np.int64]

CATCH_ALL = -1


class NovelAIBatch(NamedTuple):
    """Rows of the images, and the bucket they are trained in (`CATCH_ALL`: the base size)."""

    rows: Rows
    bucket: int


class NovelAIEpochs:
    """Epochs of one rank; each call of `epoch()` goes through the next one.

    Every rank makes its own object with the same images and seed. An epoch permutes all images, drops the last
    ones so that the count divides by batch size times world size, and gives each rank every world-size-th. Per
    bucket the rank shuffles its images and moves what does not fill a batch to the catch-all; then buckets are
    drawn with probabilities proportional to what they still hold.

    Args:
        bucket_index: [N] bucket of each image, e.g. `NovelAIBuckets().place(sizes).bucket_index`; -1 (pruned)
            images are never trained. The order of rows is the program's insertion order.
        batch_size, world_size, rank: as everywhere.
        seed: the program's default is 42.
        ids: [N] numbers or texts that sort the images before the permutation; by default their row numbers.

    Attributes:
        trimmed: rows the epoch at hand leaves out on all ranks, so that it divides.
        batch_total: batches of the epoch at hand.

    Raises:
        PlanError: batch size, world size or rank that do not fit together, or an id that occurs twice.
    """

    def __init__(
        self,
        bucket_index: Any,
        batch_size: int = 1,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 42,
        ids: Any = None,
    ) -> None:
        self._bucket = np.asarray(bucket_index, dtype=np.int64)
        rows = np.flatnonzero(self._bucket >= 0)
        if ids is not None:
            keys = np.asarray(ids)
            if len(keys) != len(self._bucket):
                raise PlanError(f"there are {len(keys)} ids for {len(self._bucket)} images: each needs one")
            order = rows[np.argsort(keys[rows], kind="stable")]
            same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
            if len(same):
                raise PlanError(f"the id {keys[order[same[0]]]!r} occurs twice: every image needs its own")
            rows = order
        self._sorted = rows
        self._members = [np.flatnonzero(self._bucket == b) for b in range(int(self._bucket.max(initial=-1)) + 1)]
        self.batch_size = batch_size
        self._set_ranks(world_size, rank)
        self._draws = np.random.RandomState(seed)
        self._shards = np.random.RandomState(_positive_int64(self._draws) % (2**32 - 1))
        self._delivered = 0
        self.start_epoch()

    def start_epoch(self, world_size: int | None = None, rank: int | None = None) -> None:
        """Shard and shuffle anew, giving up what is left of the epoch at hand."""
        self._set_ranks(self.world_size if world_size is None else world_size, self.rank if rank is None else rank)
        shuffled = self._shards.permutation(self._sorted)
        kept = len(shuffled) - len(shuffled) % (self.batch_size * self.world_size)
        self.trimmed: Rows = shuffled[kept:]
        mine = np.zeros(len(self._bucket), dtype=np.bool_)
        mine[shuffled[self.rank : kept : self.world_size]] = True
        self.batch_total = kept // (self.batch_size * self.world_size)
        self._delivered = 0
        self._full: dict[int, Rows] = {}
        rest = []
        for bucket, members in enumerate(self._members):
            if not len(members):
                continue
            rows = members[mine[members]]
            self._draws.shuffle(rows)
            overhang = len(rows) % self.batch_size
            rest.append(rows[:overhang])
            if len(rows) > overhang:
                self._full[bucket] = rows[overhang:]
        self._rest: Rows = np.concatenate([np.zeros(0, dtype=np.int64), *rest])

    def epoch(self) -> Iterator[NovelAIBatch]:
        """The batches left in the epoch at hand, or, if there are none, those of the next one."""
        if self._delivered >= self.batch_total:
            self.start_epoch()
        while self._delivered < self.batch_total:
            yield self.next_batch()

    def next_batch(self) -> NovelAIBatch:
        """Draw one batch; a new epoch starts when the present one is done.

        Raises:
            PlanError: there are fewer images than one global batch.
        """
        if self._delivered >= self.batch_total:
            self.start_epoch()
            if not self.batch_total:
                raise PlanError(
                    f"{len(self._sorted)} images do not fill one batch of {self.batch_size} on {self.world_size} "
                    f"ranks: lower the batch size"
                )
        self._delivered += 1
        bucket = self._draw_bucket()
        if bucket == CATCH_ALL:
            self._draws.shuffle(self._rest)
            rows, self._rest = self._rest[: self.batch_size], self._rest[self.batch_size :]
            return NovelAIBatch(rows, CATCH_ALL)
        rows, left = self._full[bucket][: self.batch_size], self._full[bucket][self.batch_size :]
        if len(left):
            self._full[bucket] = left
        else:
            del self._full[bucket]
        return NovelAIBatch(rows, bucket)

    def _draw_bucket(self) -> int:
        if not self._full:
            return CATCH_ALL
        names, held = list(self._full), [len(rows) for rows in self._full.values()]
        if len(self._rest) >= self.batch_size:
            names, held = [CATCH_ALL, *names], [len(self._rest), *held]
        # What `RandomState.choice(names, 1, p=shares)` does, without its checks; the shares are float32 there.
        shares = np.array(held, dtype=np.float32)
        shares /= shares.sum()
        cumulated = shares.astype(np.float64).cumsum()
        cumulated /= cumulated[-1]
        return names[int(cumulated.searchsorted(self._draws.random_sample(1), side="right")[0])]

    def _set_ranks(self, world_size: int, rank: int) -> None:
        if self.batch_size < 1 or world_size < 1 or not 0 <= rank < world_size:
            raise PlanError(
                f"batch size {self.batch_size}, world size {world_size} and rank {rank} do not fit together: "
                f"the first two must be 1 or more, and the rank below the world size"
            )
        self.world_size, self.rank = world_size, rank


def _positive_int64(state: np.random.RandomState) -> int:
    """`RandomState.tomaxint()` of a machine whose C long has 64 bits, on every machine."""
    high, low = (int(x) for x in np.frombuffer(state.bytes(8), dtype="<u4"))
    return (high << 32 | low) >> 1
