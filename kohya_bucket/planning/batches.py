"""Cutting each bucket's images into global batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs


@dataclass(frozen=True)
class BatchLayout:
    """Batches in bucket order: batch i is `items[start[i] : start[i] + length[i]]`.

    Attributes:
        start, length: [S] int64 and int32.
        bucket: [S] int32.
        turn: [S] number of the batch among those of its bucket; only the last may be short, unless batches were
            split.
        per_bucket: [K] batches of each bucket.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int32]
    bucket: npt.NDArray[np.int32]
    turn: npt.NDArray[np.int64]
    per_bucket: npt.NDArray[np.int64]

    @classmethod
    def from_columns(
        cls, start: npt.NDArray[np.int64], length: npt.NDArray[np.integer], bucket: npt.NDArray[np.integer], k: int
    ) -> BatchLayout:
        """Batches of these starts, lengths and buckets of `k`, in bucket order."""
        per_bucket = np.bincount(bucket, minlength=k).astype(np.int64)
        return cls(start, length.astype(np.int32), bucket.astype(np.int32), runs(per_bucket), per_bucket)


def cut_batches(counts: npt.NDArray[np.int64], global_batch: npt.NDArray[np.int64]) -> BatchLayout:
    """ceil(counts / global_batch) batches of each bucket, all full except for the last of a bucket."""
    per_bucket = -(-counts // global_batch)
    bucket = np.repeat(np.arange(len(counts), dtype=np.int32), per_bucket)
    turn = runs(per_bucket)
    into = turn * global_batch[bucket]
    length = np.minimum(global_batch[bucket], counts[bucket] - into).astype(np.int32)
    return BatchLayout((np.cumsum(counts) - counts)[bucket] + into, length, bucket, turn, per_bucket)


def split_batches(cut: BatchLayout, steps: int) -> BatchLayout:
    """The same images in `steps` batches: as often as needed, the batch with the most images is split in two.

    Nothing is split where there are as many batches already, nor a batch of one image.
    """
    missing = steps - len(cut.length)
    if missing <= 0:
        return cut
    # Each split takes one of these, or a part of one; all others stay. Batches are in order of their starts.
    longest = np.argsort(-cut.length, kind="stable")[:missing]
    heap = [(-int(cut.length[i]), int(cut.start[i]), int(cut.bucket[i])) for i in longest]
    heapq.heapify(heap)
    while missing > 0 and heap and heap[0][0] < -1:
        negative, begin, k = heapq.heappop(heap)
        first = -(negative // 2)
        heapq.heappush(heap, (-first, begin, k))
        heapq.heappush(heap, (negative + first, begin + first, k))
        missing -= 1
    parts = np.array(heap, dtype=np.int64).reshape(-1, 3)
    kept = np.ones(len(cut.length), dtype=np.bool_)
    kept[longest] = False
    length = np.concatenate([cut.length[kept], -parts[:, 0]])
    start = np.concatenate([cut.start[kept], parts[:, 1]])
    bucket = np.concatenate([cut.bucket[kept], parts[:, 2]])
    order = np.argsort(start, kind="stable")
    return BatchLayout.from_columns(start[order], length[order], bucket[order], len(cut.per_bucket))


Items = npt.NDArray[np.int32]


def separate_repeats(items: Items, cut: BatchLayout, rng: np.random.RandomState) -> None:
    """Reorder `items` in place, within their buckets, so that no batch holds an image twice if that can be.

    It can be for every bucket with at least as many full batches as its most repeated image has trainings;
    otherwise, if all are full, no batch holds an image more often than it must. Only repeats that meet are moved,
    each exchanged with an image of the nearest batch that suits both. Where that does not work out, the whole
    bucket is dealt out anew.
    """
    crowded = _crowded_batches(items, cut)
    if len(crowded) == 0:
        return
    first = np.cumsum(cut.per_bucket) - cut.per_bucket
    # Batches are in bucket order, so the crowded ones of a bucket are neighbours.
    buckets, begins = np.unique(cut.bucket[crowded], return_index=True)
    for k, of_bucket in zip(buckets.tolist(), np.split(crowded, begins[1:]), strict=True):
        batches = np.arange(first[k], first[k] + cut.per_bucket[k])
        if len(batches) > 1 and not _exchange(items, cut, batches, of_bucket):
            lengths = cut.length[batches]
            begin = int(cut.start[batches[0]])
            end = begin + int(lengths.sum())
            items[begin:end] = deal_apart(items[begin:end], lengths, rng)


def _crowded_batches(items: Items, cut: BatchLayout) -> npt.NDArray[np.intp]:
    """Numbers of the batches that hold an image more than once."""
    keys = np.repeat(np.arange(len(cut.length), dtype=np.int64) << 32, cut.length)
    keys |= items
    keys.sort()
    return np.unique(keys[1:][keys[1:] == keys[:-1]] >> 32)


def _exchange(items: Items, cut: BatchLayout, batches: npt.NDArray[np.intp], crowded: npt.NDArray[np.intp]) -> bool:
    """Exchange the second of each pair in the `crowded` of a bucket's `batches` with an image of the nearest batch that
    suits both; False where there is none."""
    begin, end, last = cut.start, cut.start + cut.length, int(batches[-1])
    for number in crowded.tolist():
        batch = items[begin[number] : end[number]]
        while (place := _second_of_a_pair(batch)) is not None:
            for other in _outward(number, int(batches[0]), last):
                partner = items[begin[other] : end[other]]
                if batch[place] in partner:
                    continue
                fits = np.flatnonzero(~np.isin(partner, batch))
                if len(fits):
                    batch[place], partner[fits[0]] = partner[fits[0]], batch[place]
                    break
            else:
                return False
    return True


def _second_of_a_pair(batch: Items) -> int | None:
    """The place of an image that stands in the batch before, too."""
    order = np.argsort(batch, kind="stable")
    again = np.flatnonzero(batch[order[1:]] == batch[order[:-1]])
    return int(order[again[0] + 1]) if len(again) else None


def _outward(s: int, first: int, last: int) -> Iterator[int]:
    # One after the other: a partner is nearly always near, and buckets of few images repeated often have many batches.
    return (t for d in range(1, max(s - first, last - s) + 1) for t in (s + d, s - d) if first <= t <= last)


def deal_apart(items: Items, lengths: npt.NDArray[np.int32], rng: np.random.RandomState) -> Items:
    """Deal one bucket's trainings into batches of the given lengths like cards, image after image.

    Consecutive trainings go to consecutive batches, so an image with no more trainings than there are batches
    meets itself nowhere; images that need every batch come first, while the short batch still has room.

    Args:
        items: [T] image numbers, repeats included.
        lengths: [B] sizes of the batches, all equal except for a shorter last one.

    Returns:
        [T] the same trainings, batch after batch.
    """
    images, times = np.unique(items, return_counts=True)
    order = np.arange(len(images))
    rng.shuffle(order)
    order = order[np.argsort(times[order] < len(lengths), kind="stable")]
    cards = np.repeat(images[order], times[order])
    batch = np.repeat(np.arange(len(lengths)), lengths)
    dealt = np.empty_like(items)
    dealt[np.lexsort((batch, runs(lengths)))] = cards
    return dealt
