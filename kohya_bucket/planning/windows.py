"""Windows of shards: an epoch in parts, each of which reads few shards, so that each shard is read once.

A node is what has one cache of shards: a machine, whose ranks are neighbours. What a window holds is dealt out to the
nodes by shards, so that each node reads its own. A plan depends on the number of nodes that it is asked for, and not on
how many there are: ranks may come and go, and every step still trains the same images.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.batches import BatchLayout
from kohya_bucket.planning.demand import Demand, smallest_ids

Ints = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Windows:
    """The windows of an epoch, or of what is left of it.

    Attributes:
        of_shard: number of the window in which each shard is read.
        shards: [N] in which each image lies.
        parts: [N] by which a bucket's images are to be put in order before batches are cut: the windows; with several
            nodes the shards, sorted by window.
        nodes: between how many nodes a window's shards are divided.
    """

    of_shard: npt.NDArray[np.int32]
    shards: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int32]
    nodes: int

    @classmethod
    def drawn(
        cls, shards: npt.NDArray[np.int32], demand: Demand, global_batch: npt.NDArray[np.int64], open_shards: int,
        nodes: int, rng: np.random.RandomState,
    ) -> Windows:  # fmt: skip
        """Windows of half of the shards that all nodes may have open: two windows meet in a batch."""
        windows, numbers = windows_of_shards(shards, demand, global_batch, nodes * open_shards // 2, rng)
        return cls(windows, shards, (windows if nodes == 1 else numbers)[shards], nodes)

    def of_images(self, images: Ints) -> npt.NDArray[np.int32]:
        """The window in which each of these images is read."""
        return self.of_shard[self.shards[images]]

    def grouped(
        self, items: npt.NDArray[np.int32], cut: BatchLayout, rng: np.random.RandomState
    ) -> tuple[BatchLayout, npt.NDArray[np.int64]]:
        """Deal `items` out to the nodes, in place, and make what a bucket has in one window a bucket of its own.

        Returns:
            the batches with these buckets; and [S] by which steps are to be sorted: window after window, in each the
            batches first that begin in an earlier one, so that the shards of that one are done with.
        """
        first, last = self.of_images(items[cut.start]), self.of_images(items[cut.start + cut.length - 1])
        joins = last > first
        if self.nodes > 1:
            # Items of another bucket or window begin inside batches that join windows, and with batches.
            begins = np.append(
                self._inside(items, cut, joins), cut.start[(cut.turn == 0) | (first != np.roll(last, 1))]
            )
            _deal_to_nodes(items, np.sort(np.append(begins, len(items))), _nodes_of_places(cut.length, self.nodes), rng)
        begins_group = np.ones(len(last), dtype=np.bool_)
        begins_group[1:] = (cut.bucket[1:] != cut.bucket[:-1]) | (last[1:] != last[:-1])
        group = np.cumsum(begins_group) - 1
        return BatchLayout.from_columns(cut.start, cut.length, group, 0), 2 * last.astype(np.int64) + ~joins

    def _inside(
        self, items: npt.NDArray[np.int32], cut: BatchLayout, joins: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """Places in batches that join windows at which another window begins."""
        start, length = cut.start[joins], cut.length[joins]
        into, place = runs(length), runs(length, start)
        window = self.of_images(items[place])
        inside: npt.NDArray[np.int64] = place[1:][(window[1:] != window[:-1]) & (into[1:] > 0)]
        return inside


def checked_shards(shards: npt.ArrayLike, images: int) -> npt.NDArray[np.int32]:
    """[N] shard numbers as given to an option.

    Raises:
        PlanError: not a whole number for each image, a negative one, or one far above the number of images.
    """
    array = array_of("shards", shards)
    if array.shape != (images,) or (images and array.dtype.kind not in "iu"):
        raise PlanError(
            f"shards is {array.dtype} of shape {list(array.shape)}, but must be one whole number for each of {images} "
            "images: the number of the shard that it lies in"
        )
    if images and not 0 <= int(array.min()) <= int(array.max()) < 2 * images + 1024:
        raise PlanError(
            f"shards has numbers from {array.min()} to {array.max()} for {images} images: count the shards from 0, "
            "e.g. with np.unique(names, return_inverse=True)"
        )
    return array.astype(np.int32, copy=False)


def windows_of_shards(
    shards: npt.NDArray[np.int32],
    demand: Demand,
    global_batch: npt.NDArray[np.int64],
    most: int,
    rng: np.random.RandomState,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """[shards] number of the window in which each shard is read: at most `most` shards in each, at random.

    Every bucket deals its shards, in random order, round the windows in full rounds. The shards left over, bucket after
    bucket, are laid in rows with one window to a column, every other row backwards. So any two windows hold equally
    many of a bucket's shards, give or take two, and the windows of a bucket with fewer shards than there are windows
    are neighbours. Images that fill no batch in one window are completed in the next: where each shard holds images of
    one bucket, and enough for a global batch (of each bucket one may hold less), no image waits longer.

    Returns:
        the windows; and [shards] numbers that sort the shards by window.
    """
    shard_of_row = demand.of_rows(shards)
    n_shards = int(shards.max(initial=-1)) + 1
    images = np.bincount(shard_of_row, demand.times, minlength=n_shards)
    bucket = np.zeros(n_shards, dtype=np.int64)
    bucket[shard_of_row] = demand.bucket  # of several, that of its last row
    # Put shards in the order in which they are dealt to windows: bucket after bucket, at random within.
    small = images < global_batch[bucket] if len(global_batch) else images < 0
    occurring = np.flatnonzero(images)
    rng.shuffle(occurring)
    bucket_place = np.arange(demand.n_buckets)
    rng.shuffle(bucket_place)
    # Shards too small for a batch go last in their bucket: amid the others they would keep earlier windows open.
    dealt = occurring[np.lexsort((small[occurring], bucket_place[bucket[occurring]]))]
    # Deal each bucket's shards to the windows in full rounds; lay those left over in rows, there and back.
    n_windows = max(1, -(-len(dealt) // most))
    shards_of = np.bincount(bucket[dealt], minlength=demand.n_buckets)
    bucket_begins = np.flatnonzero(np.diff(bucket[dealt], prepend=-1))
    number = np.arange(len(dealt)) - np.repeat(bucket_begins, np.diff(bucket_begins, append=len(dealt)))
    in_full_rounds = number < (shards_of // n_windows * n_windows)[bucket[dealt]]
    row, column = np.divmod(np.cumsum(~in_full_rounds) - 1, n_windows)
    windows = np.zeros(n_shards, dtype=np.int32)
    windows[dealt] = np.where(in_full_rounds, number % n_windows, np.where(row % 2, n_windows - 1 - column, column))
    # Number the shards so that those of one window are neighbours.
    numbers = np.zeros(n_shards, dtype=np.int32)
    numbers[dealt[np.argsort(windows[dealt], kind="stable")]] = np.arange(len(dealt), dtype=np.int32)
    return windows, numbers


def _deal_to_nodes(
    items: npt.NDArray[np.int32], begins: Ints, node: npt.NDArray[np.integer], rng: np.random.RandomState
) -> None:
    """Reorder `items` in place, within their bucket and window: each node's part of the batches has few shards.

    Node m of M trains the m-th of M parts of each batch: its ranks are neighbours. A bucket's items of one window,
    which come shard after shard, are cut into one stretch for each node, as long as all its parts of them together, and
    each stretch is shuffled. So a node reads a bucket's shards of a window by itself, except for those at the two ends.

    Args:
        begins: where in `items` those of another bucket or window begin, sorted, and their end.
        node: [T] that trains each place.
    """
    for begin, end in pairwise(begins.tolist()):
        stretch, at = items[begin:end].astype(np.intp), 0  # the kind that numpy shuffles fastest
        for many in np.bincount(node[begin:end]).tolist():
            rng.shuffle(stretch[at : at + many])
            at += many
        items[begin:end][np.argsort(node[begin:end], kind="stable")] = stretch


def _nodes_of_places(length: Ints, nodes: int) -> Ints:
    """[T] node that trains each place of batches of these lengths, one batch after another."""
    changes = np.flatnonzero(np.diff(length)) + 1
    runs = pairwise([0, *changes.tolist(), len(length)])
    of_batch = [(int(length[begin]), end - begin) for begin, end in runs if begin < end]
    parts = [np.tile(smallest_ids(np.arange(n) * nodes // n, nodes), times) for n, times in of_batch]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
