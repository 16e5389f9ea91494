"""Sort a stream into buckets with bounded memory: at most so many images wait for others of their bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.checks import one_of
from kohya_bucket.errors import KohyaBucketError

__all__ = ["REMAINDERS", "StreamBuffer", "StreamCounts"]

Sample = TypeVar("Sample")
REMAINDERS = ("keep", "pad", "drop")


@dataclass
class StreamCounts:
    """What happened to the images of one pass: every one that came is trained or counted here.

    Attributes:
        trained: images in batches, each once.
        repeated: images added a second time, to fill a batch or to give every rank one.
        dropped: images left out by `remainder="drop"`.
        short: batches smaller than asked.
        unplaced: images without a bucket, unreadable ones included: not trained.
    """

    trained: int = 0
    repeated: int = 0
    dropped: int = 0
    short: int = 0
    unplaced: int = 0


@dataclass
class StreamBuffer(Generic[Sample]):
    """Groups samples by bucket into batches of `batch_size * num_replicas`.

    With a generator, `capacity` images are gathered first; then, for each batch, a bucket is drawn with a
    probability proportional to what it holds, and its images at random. Without one, a batch leaves as soon as
    it is complete, in the order of arrival. When the buffer is full and no bucket can fill a batch, the fullest
    one leaves by the rule for remainders, as all buckets do at the end.

    Args:
        batch_size: images per batch and rank.
        num_replicas: ranks; each takes its slice of every batch, so that all train the same bucket.
        capacity: at most this many images wait.
        remainder: "keep": a short batch, at least one image per rank; "pad": filled by repeating its own
            images; "drop": left out.
        rng: shuffles; None keeps the order of arrival.

    Raises:
        KohyaBucketError: a capacity below one batch, or an unknown remainder.
    """

    batch_size: int
    num_replicas: int
    capacity: int
    remainder: str
    rng: np.random.Generator | None
    counts: StreamCounts = field(default_factory=StreamCounts)

    def __post_init__(self) -> None:
        self._global = self.batch_size * self.num_replicas
        if min(self.batch_size, self.num_replicas) < 1 or self.capacity < self._global:
            raise KohyaBucketError(
                f"buffer_size={self.capacity} does not hold one batch of {self.batch_size} x {self.num_replicas} "
                "ranks; make it several times as large, since images of every bucket wait in it"
            )
        one_of("remainder", self.remainder, REMAINDERS, KohyaBucketError)
        self._waiting: dict[Bucket, list[Sample]] = {}
        self._held = 0

    def batches(self, samples: Iterable[tuple[Bucket, Sample]]) -> Iterator[tuple[Bucket, list[Sample]]]:
        """(bucket, images) of each global batch; its length is a multiple of `num_replicas`."""
        for bucket, sample in samples:
            self._waiting.setdefault(bucket, []).append(sample)
            self._held += 1
            if self.rng is None and len(self._waiting[bucket]) == self._global:
                yield self._leave(bucket)
            elif self._held >= self.capacity:
                yield from self._make_room()
        while full := self._full():
            yield self._leave(self._draw(full))
        left = sorted(self._waiting)
        if self.rng is not None:
            self.rng.shuffle(left)
        for bucket in left:
            yield from self._remainder(bucket)

    def _make_room(self) -> Iterator[tuple[Bucket, list[Sample]]]:
        if full := self._full():
            yield self._leave(self._draw(full))
        else:
            yield from self._remainder(max(sorted(self._waiting), key=lambda b: len(self._waiting[b])))

    def _full(self) -> list[Bucket]:
        return sorted(b for b, waiting in self._waiting.items() if len(waiting) >= self._global)

    def _draw(self, full: list[Bucket]) -> Bucket:
        if self.rng is None:
            return full[0]
        weights = np.array([len(self._waiting[b]) for b in full], dtype=np.float64)
        return full[int(self.rng.choice(len(full), p=weights / weights.sum()))]

    def _leave(self, bucket: Bucket) -> tuple[Bucket, list[Sample]]:
        waiting = self._waiting.pop(bucket)
        if self.rng is not None:
            waiting = [waiting[i] for i in self.rng.permutation(len(waiting)).tolist()]
        batch, rest = waiting[: self._global], waiting[self._global :]
        if rest:
            self._waiting[bucket] = rest
        self._held -= len(batch)
        self.counts.trained += len(batch)
        return bucket, batch

    def _remainder(self, bucket: Bucket) -> Iterator[tuple[Bucket, list[Sample]]]:
        if self.remainder == "drop":
            dropped = len(self._waiting.pop(bucket))
            self._held -= dropped
            self.counts.dropped += dropped
            return
        _, batch = self._leave(bucket)
        own = len(batch)
        wanted = self._global if self.remainder == "pad" else -(-own // self.num_replicas) * self.num_replicas
        batch = [batch[i % own] for i in range(wanted)]
        self.counts.repeated += wanted - own
        self.counts.short += wanted < self._global
        yield bucket, batch
