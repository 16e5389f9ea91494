"""One image at several resolutions: all of them in each epoch, in turn, by weight, or by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.demand import smallest_ids
from kohya_bucket.planning.stream import Purpose, stream

_LONGEST_CYCLE = 1_000


@dataclass(frozen=True)
class ResolutionMode:
    """At which of several resolutions an epoch trains an image.

    Attributes:
        name: in options, configs and saved states.
        text: for tables and help.
        one_per_epoch: at one of them; otherwise at each.
        by_weight: weights say how often at which.
        by_schedule: all images at the first one for some epochs, then at the next.
    """

    name: str
    text: str
    one_per_epoch: bool = True
    by_weight: bool = False
    by_schedule: bool = False


RESOLUTION_MODES = {
    mode.name: mode
    for mode in (
        ResolutionMode("all", "each image at each", one_per_epoch=False),
        ResolutionMode("rotate", "one per epoch in turn"),
        ResolutionMode("weighted", "one per epoch by weight", by_weight=True),
        ResolutionMode("schedule", "one after another, each for some epochs", by_schedule=True),
    )
}
"""By name, as they are offered."""


def cycle_places(
    bucket_ids: npt.NDArray[np.integer], seed: int, repeats: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """[N] where each image begins in the cycle of resolutions.

    Images that have the same buckets, and are trained equally often, stand next to each other in an order that the
    seed draws: each such class is spread evenly over the resolutions. *How many* images of a class train at a
    resolution in an epoch does not depend on the seed, only *which* ones.

    Args:
        bucket_ids: [N, R], -1 where an image has no bucket at that resolution.
        repeats: [N] how often an image is trained, if they differ.
    """
    order = np.arange(len(bucket_ids), dtype=np.int64)
    stream(Purpose.RESOLUTIONS, seed).shuffle(order)
    # Ids from 0, as small as they fit: numpy sorts those by radix.
    columns = [smallest_ids(column[order] + 1, int(column.max(initial=-1)) + 2) for column in bucket_ids.T]
    if repeats is not None:
        columns.append(repeats[order])
    order = order[np.lexsort(columns[::-1])]
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def choose_columns(
    bucket_ids: npt.NDArray[np.integer],
    cycle: npt.NDArray[np.intp] | None,
    places: npt.NDArray[np.int64],
    epoch: int,
) -> npt.NDArray[np.intp]:
    """[N] column of `bucket_ids` (= resolution) that each image is trained at in this epoch; -1 if it has none.

    Every image walks through one cycle of resolutions, from a place of its own: over a whole cycle it is
    trained at each resolution exactly as often as asked, and every epoch holds all resolutions in (nearly)
    those shares. `rotate` is the cycle 0, 1, ..., R-1; `weighted` one in which resolution r takes its share.
    A resolution at which the image has no bucket is left out, and the next one that it has takes its place.

    Args:
        bucket_ids: [N, R], -1 where an image has no bucket at that resolution.
        cycle: the cycle of "weighted", or the one resolution of a stage of "schedule"; None for "rotate".
        places: [N] from `cycle_places`.
    """
    n, r = bucket_ids.shape
    has = [column >= 0 for column in bucket_ids.T]
    everywhere = all(column.all() for column in has)
    if cycle is not None:
        # As often as there are resolutions, an image that does not have the chosen one goes on to the next.
        chosen = cycle[(places + epoch) % len(cycle)]
        for _ in range(0 if everywhere else r):
            chosen = np.where(bucket_ids[np.arange(n), chosen] >= 0, chosen, (chosen + 1) % r)
    elif everywhere:
        chosen = (places + epoch) % max(r, 1)
    else:
        # Count only the resolutions that an image has, so that each of them gets the same number of epochs.
        to_skip = (places + epoch) % np.maximum(sum(has, np.zeros(n, dtype=np.int64)), 1)
        chosen = np.full(n, -1, dtype=np.intp)
        for number, column in enumerate(has):
            chosen[column & (to_skip == 0)] = number
            to_skip -= column
    if not everywhere:
        chosen = np.where(np.logical_or.reduce(has), chosen, -1)
    return chosen.astype(np.intp)


def stage_starts(epochs: Sequence[int] | None, n_columns: int) -> npt.NDArray[np.int64]:
    """[R] the epoch at which a schedule begins with each resolution.

    Raises:
        PlanError: another number of stages than resolutions.
    """
    lengths = list(epochs or ())
    if len(lengths) != n_columns - 1:
        raise PlanError(
            f"resolution_epochs is {lengths}, but must hold {n_columns - 1} of {n_columns} resolutions: for how many "
            "epochs each but the last is trained"
        )
    return np.cumsum([0, *lengths])


def weighted_cycle(weights: npt.ArrayLike | None, n_columns: int) -> npt.NDArray[np.intp]:
    """A cycle of column numbers in which column r has the share `weights[r]`, each spread evenly.

    Raises:
        PlanError: another number of weights, negative ones, or shares that need a cycle of over 1,000 epochs.
    """
    values = array_of("resolution_weights", weights)
    if values.shape != (n_columns,):
        raise PlanError(f"resolution_weights is {weights!r}, but must hold {n_columns} weights, one per resolution")
    try:
        ratios = [Fraction(w).limit_denominator(_LONGEST_CYCLE) for w in values.tolist()]
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"resolution_weights is {weights!r}, but must hold numbers") from error
    total = sum(ratios, Fraction(0))
    if total <= 0 or min(ratios) < 0:
        raise PlanError(f"resolution_weights is {weights!r}, but must be 0 or more and not all 0")
    shares = [w / total for w in ratios]
    length = int(np.lcm.reduce([s.denominator for s in shares]))
    if length > _LONGEST_CYCLE:
        raise PlanError(
            f"resolution_weights is {weights!r}: exact shares would take {length} epochs; "
            "use rounder weights, e.g. [3, 1]"
        )
    columns = np.repeat(np.arange(n_columns), [int(s * length) for s in shares])
    counts = np.bincount(columns, minlength=n_columns)
    # The j-th of c turns of a column lies in the middle of the j-th of c equal parts of the cycle.
    return columns[np.argsort((2 * runs(counts) + 1) / (2 * counts[columns]), kind="stable")]
