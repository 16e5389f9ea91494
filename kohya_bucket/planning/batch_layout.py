"""Cutting each bucket's images into global batches."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BatchLayout", "cut_batches", "split_batches"]


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


def cut_batches(counts: npt.NDArray[np.int64], global_batch: npt.NDArray[np.int64]) -> BatchLayout:
    """ceil(counts / global_batch) batches of each bucket, all full but for the last of a bucket."""
    per_bucket = -(-counts // global_batch)
    bucket = np.repeat(np.arange(len(counts), dtype=np.int32), per_bucket)
    turn = np.arange(len(bucket), dtype=np.int64) - np.repeat(np.cumsum(per_bucket) - per_bucket, per_bucket)
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
    length, start, bucket = length[order], start[order], bucket[order]
    per_bucket = np.bincount(bucket, minlength=len(cut.per_bucket)).astype(np.int64)
    turn = np.arange(len(bucket), dtype=np.int64) - (np.cumsum(per_bucket) - per_bucket)[bucket]
    return BatchLayout(start, length.astype(np.int32), bucket.astype(np.int32), turn, per_bucket)
