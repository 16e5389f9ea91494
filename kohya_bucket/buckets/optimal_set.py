"""The K admissible sizes that crop a dataset least: exact, by dynamic programming over sorted aspects.

What an image loses depends only on the aspects: `1 - min(a/b, b/a)`. Between two chosen neighbours every image
takes the better of the two, so the loss of a set is a sum over neighbours, and the best set is a shortest path
with K steps through the sorted candidate aspects. That cost is a Monge array (the minimum of a distance that
grows to the left and one that grows to the right is supermodular), so the best predecessor of a candidate never
lies left of the best predecessor of a narrower one, and each step of the path takes
O(candidates * log(candidates)) by divide and conquer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.buckets.sizes import FloatArray, IntArray

Ints = npt.NDArray[np.int64]


def admissible_sizes(
    max_area: int, steps: int, min_fill: float = 0.0, min_side: int = 1, max_side: int | None = None
) -> IntArray:
    """[C, 2] pixels, ascending in aspect: for each aspect the largest size of multiples of `steps` in the area.

    Args:
        min_fill: leave out sizes with less than this share of `max_area`.
        min_side, max_side: limits of each side in pixels.
    """
    units = max_area // (steps * steps)
    highest = units if max_side is None else max_side // steps
    lowest = max(1, -(-min_side // steps))
    widths = np.arange(lowest, min(highest, units // lowest) + 1, dtype=np.int64)
    tallest = np.minimum(units // np.maximum(widths, 1), highest)
    # Every height for every width, flat; then only the largest of each aspect.
    counts = np.maximum(tallest - lowest + 1, 0)
    width = np.repeat(widths, counts)
    height = runs(counts, lowest)
    full = width * height * (steps * steps) >= min_fill * max_area
    width, height = width[full], height[full]
    order = np.lexsort((-width, width / np.maximum(height, 1)))
    width, height = width[order], height[order]
    first = np.ones(len(width), dtype=np.bool_)
    first[1:] = width[1:] * height[:-1] != width[:-1] * height[1:]
    return (np.stack([width[first], height[first]], axis=1) * steps).astype(np.int32)


def least_crop_set(aspects: FloatArray, candidates: IntArray, k: int) -> tuple[IntArray, float]:
    """At most `k` rows of `candidates` with the least total crop loss over the images, and that loss.

    Fewer rows come back where more would not lower the loss.

    Args:
        aspects: [N] float64 width / height of the images, N >= 1.
        candidates: [C, 2] sizes ascending in aspect, C >= 1, no two of one aspect.
    """
    costs = _Costs(np.sort(aspects), candidates[:, 0] / candidates[:, 1])
    # `total`: the least loss up to each candidate, as the last of `count` chosen; `tail`: of the images beyond it.
    total = costs.before(np.arange(len(candidates)))
    tail = costs.after(np.arange(len(candidates)))
    best_loss, best_end, best_count = np.inf, 0, 0
    parents: list[Ints] = []
    for count in range(1, min(k, len(candidates)) + 1):
        if count > 1:
            total, parent = _extend(total, costs)
            parents.append(parent)
        closed = total + tail
        end = int(closed.argmin())
        # Prefix sums over many images leave rounding noise, which must not cost one more bucket.
        if closed[end] < best_loss - 1e-12 * len(aspects):
            best_loss, best_end, best_count = float(closed[end]), end, count
    chosen = [best_end]
    for parent in reversed(parents[: best_count - 1]):
        chosen.append(int(parent[chosen[-1]]))
    return candidates[chosen[::-1]], max(best_loss, 0.0)


class _Costs:
    """Loss of the images between two chosen candidates, and outside the first and last, by prefix sums."""

    def __init__(self, aspects: FloatArray, candidates: FloatArray) -> None:
        self.aspects, self.candidates = aspects, candidates
        self.sums = np.concatenate([[0.0], np.cumsum(aspects)])
        self.inverses = np.concatenate([[0.0], np.cumsum(1.0 / aspects)])
        self.at = np.searchsorted(aspects, candidates, side="left")

    def between(self, left: Ints, right: Ints) -> FloatArray:
        """Images from candidate `left` up to candidate `right`, each in the one that crops it less."""
        a, b = self.candidates[left], self.candidates[right]
        middle = np.searchsorted(self.aspects, np.sqrt(a * b), side="left")
        start, stop = self.at[left], self.at[right]
        # Of an image of aspect x the narrower candidate a keeps a / x, the wider candidate b x / b.
        kept = a * (self.inverses[middle] - self.inverses[start]) + (self.sums[stop] - self.sums[middle]) / b
        return np.asarray((stop - start) - kept)

    def before(self, first: Ints) -> FloatArray:
        return np.asarray(self.at[first] - self.sums[self.at[first]] / self.candidates[first])

    def after(self, last: Ints) -> FloatArray:
        start, n = self.at[last], len(self.aspects)
        return np.asarray((n - start) - self.candidates[last] * (self.inverses[n] - self.inverses[start]))


def _extend(total: FloatArray, costs: _Costs) -> tuple[FloatArray, Ints]:
    """One more bucket: for each candidate j the least `total[i] + between(i, j)` over i < j, and that i.

    One pass decides the middle candidates of all ranges; their possible predecessors overlap only where ranges meet,
    so a pass costs O(candidates).
    """
    n = len(total)
    best = np.full(n, np.inf)
    parent = np.zeros(n, dtype=np.int64)
    # Rows: first and last undecided candidate, first and last possible predecessor. Predecessors ascend with the
    # candidates, so the middle candidate's bounds those of both halves.
    ranges = np.array([[1, n - 1, 0, n - 2]], dtype=np.int64)
    while len(ranges):
        first, last, low, high = ranges.T
        middle = (first + last) // 2
        # Every possible predecessor of every middle, one range after another.
        lengths = np.minimum(high, middle - 1) - low + 1
        starts = np.cumsum(lengths) - lengths
        predecessor = runs(lengths, low)
        loss = total[predecessor] + costs.between(predecessor, np.repeat(middle, lengths))
        least = np.minimum.reduceat(loss, starts)
        # The first predecessor that reaches the least loss.
        hits = np.flatnonzero(loss == np.repeat(least, lengths))
        chosen = predecessor[hits[np.searchsorted(hits, starts)]]
        best[middle], parent[middle] = least, chosen
        ranges = np.concatenate(
            [np.stack([first, middle - 1, low, chosen], axis=1), np.stack([middle + 1, last, chosen, high], axis=1)]
        )
        ranges = ranges[ranges[:, 0] <= ranges[:, 1]]
    return best, parent
