"""Packs for trainers with block-diagonal attention: images of any sizes, side by side, up to a budget of tokens.

Two ways, of which the one with fewer packs is taken. Best-fit decreasing: images by falling tokens, each into the
fullest pack that has room. Images of equal tokens are interchangeable, so packs are counted by kind and filled a kind
at a time: a million images of a thousand sizes take as many steps as the sizes and kinds, and not as the images. And
dealing: where images have nearly equal tokens, best fit puts the largest together and leaves no room for one more.
There, images by falling tokens are dealt in rounds to a given number of packs, the largest to the emptiest. Which
image stands where is drawn anew in each epoch. What was left over makes emptier packs: those are filled anew, so that
the ranks of a step have about as many tokens.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.checks import array_of, integer, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.costs import as_tokens
from kohya_bucket.planning.stream import Purpose, stream

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PackPlan:
    """One epoch: rank r of W trains one pack in each of S steps; every image is in one pack.

    Only where packs of one image each do not divide by the ranks, fewer than W images are in two packs.

    Attributes:
        budget: tokens that no pack exceeds.
        items: [N] image numbers (more with repeats), pack after pack, in the order of steps and ranks.
        start: [S * W + 1] where each pack begins in `items`.
        tokens: [S, W] tokens of each pack.
        lower_bound: packs that any plan needs at least.
    """

    budget: int
    items: npt.NDArray[np.int32] = field(repr=False)
    start: Ints = field(repr=False)
    tokens: Ints = field(repr=False)
    lower_bound: int

    @property
    def steps(self) -> int:
        """S, the same for every rank."""
        return len(self.tokens)

    @property
    def waste(self) -> float:
        """Share of the budget of all packs that no image fills."""
        return 1 - float(self.tokens.sum()) / (self.tokens.size * self.budget) if self.tokens.size else 0.0

    @property
    def slack(self) -> int:
        """Most tokens by which two ranks differ in a step."""
        return int(np.ptp(self.tokens, axis=1).max(initial=0))

    def indices(self, step: int, rank: int) -> npt.NDArray[np.int32]:
        """Image numbers of a rank's pack; at least one.

        Raises:
            PlanError: the epoch has no such step, or the plan no such rank.
        """
        if not (0 <= step < self.steps and 0 <= rank < self.tokens.shape[1]):
            steps, ranks = self.tokens.shape
            raise PlanError(f"step {step} of rank {rank} does not exist: there are {steps} steps of {ranks} ranks")
        at = step * self.tokens.shape[1] + rank
        return self.items[self.start[at] : self.start[at + 1]]

    def left(self, step: int) -> npt.NDArray[np.int32]:
        """Image numbers of this step and the later ones, in ascending order: what another number of ranks goes on with.

        Raises:
            PlanError: the epoch has fewer steps.
        """
        if not 0 <= step <= self.steps:
            raise PlanError(f"{step} steps are done, but the epoch has only {self.steps}")
        at = self.start[step * self.tokens.shape[1]]
        return np.setdiff1d(self.items[at:], self.items[:at])

    @cached_property
    def hash(self) -> str:
        """Digest of every pack: ranks that have the same one train the same plan."""
        digest = hashlib.blake2b(f"{self.tokens.shape} {self.budget}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.items, dtype="<i4").data)
        digest.update(np.ascontiguousarray(self.start, dtype="<i8").data)
        return digest.hexdigest()


def plan_packs(
    tokens: npt.ArrayLike,
    budget: int,
    *,
    world_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    images: npt.ArrayLike | None = None,
) -> PackPlan:
    """Plan the packs of an epoch for all ranks: a pure function of its arguments.

    Packs of nearly equal tokens meet in a step. Where their number does not divide by the ranks, some are split in two.

    Args:
        tokens: [N] tokens of each image, 1 or more.
        budget: tokens that a pack holds at most.
        world_size: number of ranks.
        seed, epoch: choose which images of equal tokens stand together, and the order of the steps.
        images: the numbers of those to be trained, each once; by default all. To go on after some steps with another
            number of ranks, give `plan.left(steps)`.

    Raises:
        PlanError: an image that does not fit into the budget, fewer images than ranks, or a value outside its range.
    """
    each, budget, ranks = (
        as_tokens(tokens, "tokens"),
        whole("budget", budget, 1),
        whole("world_size", world_size, 1, bits=31),
    )
    chosen = np.arange(len(each)) if images is None else _chosen(images, len(each))
    each = each[chosen]
    if each.max(initial=0) > budget:
        largest = int(each.argmax())
        raise PlanError(f"image {chosen[largest]} has {each[largest]:,} tokens, but the budget is {budget:,}: raise it")
    if 0 < len(each) < ranks:
        raise PlanError(f"there are {len(each)} images for {ranks} ranks: each needs one in a step")
    rng = stream(Purpose.IMAGES, integer("seed", seed), whole("epoch", epoch, 0, bits=31), 0)
    bound = max(-(-int(each.sum()) // budget), int((each * 2 > budget).sum()))
    order = rng.permutation(len(each))
    by_size = order[np.argsort(each[order], kind="stable")]  # images of equal tokens, mixed
    lengths, items = _best_fit(each, by_size, budget)
    for share in _MORE:
        packs = math.ceil(bound * (1 + share))
        if packs < len(lengths) and (dealt := _dealt(each, by_size[::-1], packs, budget)) is not None:
            lengths, items = dealt
            break
    lengths, items = _levelled(*_divisible(lengths, items, each, ranks), each, ranks, budget)
    start = np.append(0, np.cumsum(lengths))
    load = _loads(each, lengths, items)
    # neighbours by tokens meet in a step, equal ones mixed; then the steps are mixed
    order = rng.permutation(len(load))
    order = order[np.argsort(-load[order], kind="stable")].reshape(-1, ranks)
    order = order[rng.permutation(len(order))]
    flat = order.reshape(-1)
    packed = chosen[items[runs(lengths[flat], start[flat])]].astype(np.int32)
    return PackPlan(budget, packed, np.append(0, np.cumsum(lengths[flat])), load[order].astype(np.int64), bound)


def _loads(each: Ints, lengths: Ints, items: Ints) -> Ints:
    """[P] tokens of each pack."""
    loads: Ints = np.add.reduceat(each[items], np.cumsum(lengths) - lengths) if len(items) else lengths
    return loads


def _chosen(images: npt.ArrayLike, n: int) -> Ints:
    chosen: Ints = array_of("images", images, dtype=np.int64)
    if chosen.ndim != 1 or chosen.min(initial=0) < 0 or chosen.max(initial=-1) >= n:
        raise PlanError(f"images must be numbers from 0 to {n - 1}")
    if len(np.unique(chosen)) < len(chosen):
        raise PlanError("images holds a number twice: each is trained once")
    return chosen


def _best_fit(each: Ints, by_size: Ints, budget: int) -> tuple[Ints, Ints]:
    """([P] images of each pack, [N] rows of images, pack after pack)."""
    sizes, counts = np.unique(each, return_counts=True)
    taken = np.cumsum(counts) - counts
    lengths, items = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for packs, content in _kinds(sizes, counts, budget):
        columns = []
        for row, more in content:
            columns.append(by_size[taken[row] : taken[row] + packs * more].reshape(packs, more))
            taken[row] += packs * more
        block = np.concatenate(columns, axis=1)
        lengths.append(np.full(packs, block.shape[1]))
        items.append(block.reshape(-1))
    return np.concatenate(lengths), np.concatenate(items)


_MORE = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)  # than the fewest packs that there can be


def _dealt(each: Ints, falling: Ints, packs: int, budget: int) -> tuple[Ints, Ints] | None:
    """As `_best_fit`, with so many packs; None where one becomes too full. `falling` are rows by falling tokens.

    Some packs hold an image less than the others: the largest.
    """
    fewer, more = divmod(len(falling), packs)
    large = (packs - more) * fewer
    pack = np.empty(len(falling), dtype=np.int64)
    for part, number, before in ((slice(0, large), packs - more, 0), (slice(large, None), more, packs - more)):
        rows, load = falling[part], np.zeros(number, dtype=np.int64)
        for first in range(0, len(rows), max(number, 1)):
            emptiest = np.argsort(load, kind="stable")
            load[emptiest] += each[rows[first : first + number]]
            pack[part][first : first + number] = emptiest + before
        if load.max(initial=0) > budget:
            return None
    return np.bincount(pack, minlength=packs), falling[np.argsort(pack, kind="stable")]


PackKind = tuple[int, tuple[tuple[int, int], ...]]
"""(how many packs, what is in each: (row of the size, images of it))."""


def _kinds(sizes: Ints, counts: Ints, budget: int) -> list[PackKind]:
    """Best-fit decreasing, for all images of a size at once."""
    open_: dict[int, list[PackKind]] = defaultdict(list)  # by the room that is left
    for row in range(len(sizes) - 1, -1, -1):
        size, left = int(sizes[row]), int(counts[row])
        for room in sorted(room for room in open_ if room >= size):  # the fullest first, each as full as it gets
            fit = room // size
            kinds, open_[room] = open_[room], []
            for packs, content in kinds:
                full, rest = min(packs, left // fit), 0
                if full < packs:
                    rest = left - full * fit  # fewer than fit: one pack takes them
                for number, more in ((full, fit), (1 if rest else 0, rest)):
                    if number:
                        open_[room - more * size].append((number, (*content, (row, more))))
                        left -= number * more
                if unchanged := packs - full - (rest > 0):
                    open_[room].append((unchanged, content))
            if not open_[room]:
                del open_[room]
            if not left:
                break
        fit = budget // size
        for number, more in ((left // fit, fit), (1, left % fit)):
            if number and more:
                open_[budget - more * size].append((number, ((row, more),)))
    return [kind for room in sorted(open_) for kind in open_[room]]


def _divisible(lengths: Ints, items: Ints, each: Ints, ranks: int) -> tuple[Ints, Ints]:
    """The same images in packs whose number divides by the ranks: packs of several are cut in two, the fullest first.

    Where no pack holds several images, the smallest are trained again.
    """
    while missing := -len(lengths) % ranks:
        several = np.flatnonzero(lengths > 1)
        if not len(several):
            again = items[np.argsort(each[items], kind="stable")[:missing]]
            return np.append(lengths, np.ones(missing, dtype=np.int64)), np.append(items, again)
        load = _loads(each, lengths, items)
        cut = np.sort(several[np.argsort(-load[several], kind="stable")[:missing]])
        halves = lengths[cut] // 2
        lengths = np.insert(lengths, cut, halves)
        lengths[cut + np.arange(len(cut)) + 1] -= halves
    return lengths, items


_UNEVEN = 0.05  # of the budget, between the fullest and the emptiest pack of a step
_POOLED = (0, 1, 2, 4, 8, 16, 32)  # fuller steps whose packs are filled anew with those of the uneven ones
_MOST_POOLED = 100_000  # images: a tenth of a second


def _levelled(lengths: Ints, items: Ints, each: Ints, ranks: int, budget: int) -> tuple[Ints, Ints]:
    """The same images in as many packs, the emptier ones filled anew so that a step's ranks have about as many tokens.

    Uneven are the steps of the emptiest packs, which hold what was left over. Their images and those of some steps
    before them are dealt out once more, by falling tokens, each to the emptiest pack.
    """
    load = _loads(each, lengths, items)
    falling = np.argsort(-load, kind="stable")
    gaps = _gaps(load[falling], ranks)
    uneven = np.flatnonzero(gaps > _UNEVEN * budget)
    if not len(uneven):
        return lengths, items
    at, best = np.cumsum(lengths) - lengths, (int(gaps.max()), lengths, items)
    for more in _POOLED:
        pool = falling[max(0, int(uneven[0]) - more) * ranks :]
        kept = np.delete(np.arange(len(load)), pool)
        images = items[runs(lengths[pool], at[pool])]
        if len(images) > _MOST_POOLED:
            break
        dealt = _to_the_emptiest(each, images, len(pool))
        loads = np.append(load[kept], [each[pack].sum() for pack in dealt])
        gap = int(_gaps(-np.sort(-loads), ranks).max())
        if loads.max() <= budget and gap < best[0]:
            new = np.append(lengths[kept], [len(pack) for pack in dealt])
            best = gap, new, np.concatenate([items[runs(lengths[kept], at[kept])], *dealt])
        if best[0] <= _UNEVEN * budget or len(kept) == 0:
            break
    return best[1:]


def _gaps(falling: Ints, ranks: int) -> Ints:
    """[S] tokens between the fullest and the emptiest pack of each step."""
    steps = falling.reshape(-1, ranks)
    gaps: Ints = steps[:, 0] - steps[:, -1]
    return gaps


def _to_the_emptiest(each: Ints, images: Ints, packs: int) -> list[Ints]:
    """`packs` lists of images, by falling tokens each to the pack with the fewest."""
    heap = [(0, pack) for pack in range(packs)]
    dealt: list[list[int]] = [[] for _ in range(packs)]
    for image in images[np.argsort(-each[images], kind="stable")].tolist():
        tokens, pack = heap[0]
        dealt[pack].append(image)
        heapq.heapreplace(heap, (tokens + int(each[image]), pack))
    return [np.array(pack, dtype=np.int64) for pack in dealt]
