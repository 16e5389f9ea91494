"""`plan_epoch`: from bucket numbers to `[step][rank] -> indices`. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy.typing as npt

from kohya_bucket.planning.plan import EpochPlan
from kohya_bucket.planning.planner import EpochPlanner

__all__ = ["plan_epoch"]


def plan_epoch(
    bucket_ids: npt.ArrayLike,
    batch_size: npt.ArrayLike | None = None,
    *,
    world_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    remainder: str = "keep",
    order: str = "shuffled",
    repeats: npt.ArrayLike | Fraction | Sequence[Fraction] | None = None,
    accumulate: int = 1,
    max_pixels: int | None = None,
    bucket_sizes: npt.ArrayLike | None = None,
    regularization: npt.ArrayLike | None = None,
    regularization_uses: int | None = None,
    resolutions: str | None = None,
    resolution_weights: npt.ArrayLike | None = None,
    run_length: int = 8,
    crop_limit: float = 0.25,
    base_bucket: int | None = None,
    bucket_groups: npt.ArrayLike | None = None,
    enlarge: npt.ArrayLike = True,
    equal_epochs: bool = False,
    done: Sequence[tuple[Any, int]] = (),
) -> EpochPlan:
    """Plan one epoch for all ranks.

    Equal arguments give equal plans, on every rank, machine, Python and numpy. Global batches of one bucket are
    planned first and sliced by rank afterwards: with `batch_size * world_size` kept, the images of each step are
    the same for any number of ranks.

    Args:
        bucket_ids: [N] bucket number of each image, -1 without one; or [N, R] with one column per resolution.
        batch_size: images of one rank in one step: a number, or [K] per bucket.
        world_size: number of ranks.
        seed: any integer.
        epoch: 0 or more.
        remainder: what becomes of the images that do not fill a global batch: "keep" (trained in a short batch),
            "pad", "drop", "merge" or "catch_all".
        order: "shuffled" (mixed, each bucket spread evenly), "runs" (`run_length` steps of one bucket at a time),
            "sorted" (bucket after bucket, images shuffled within), "file" (nothing shuffled at all).
        repeats: how often an image is trained in an epoch: a number or [N], whole or fractions such as 2.5 or 0.1.
        accumulate: steps for one update; the plan's steps do not depend on it.
        max_pixels: bound of images x width x height per rank and step, in place of or besides `batch_size`.
        bucket_sizes: [K, 2] (width, height); needed by `max_pixels`, "merge", and "catch_all" without base.
        regularization: [N] bool, images that are used in rotation instead of `repeats` times.
        regularization_uses: trainings of regularization images per epoch; by default as many as of all others.
        resolutions: how [N, R] ids are used: "all" (each image at each resolution), "rotate" (one resolution per
            epoch, in turn) or "weighted" (one, in the shares of `resolution_weights`).
        run_length: steps of one run, for order="runs".
        crop_limit: share of an image's area that "merge" may crop off by moving it.
        base_bucket: bucket of the catch-all batches; by default the squarest, then the largest.
        bucket_groups: [K], images are never moved from one group to another (e.g. two data sets).
        enlarge: whether "merge" and "catch_all" may move an image to a bucket that is larger in a side, for all or
            [K] by its own bucket; without it, pixels lost by scaling down count towards `crop_limit` too.
        equal_epochs: every epoch has as many steps as the longest. With "rotate" and "weighted", epochs have the same
            number of images, but their buckets leave other remainders; shorter epochs split batches in two.
        done: what of the epoch has been trained already, as (global batch, steps) in order. The plan then holds
            the rest: with the same global batch the very steps that would have followed, on any number of ranks;
            with another one the images that are left, planned anew. A global batch is a number or [K].

    Raises:
        PlanError: a value outside of its range, or an option without what it needs.
    """
    planner = EpochPlanner(
        bucket_ids,
        batch_size,
        world_size=world_size,
        remainder=remainder,
        order=order,
        repeats=repeats,
        accumulate=accumulate,
        max_pixels=max_pixels,
        bucket_sizes=bucket_sizes,
        regularization=regularization,
        regularization_uses=regularization_uses,
        resolutions=resolutions,
        resolution_weights=resolution_weights,
        run_length=run_length,
        crop_limit=crop_limit,
        base_bucket=base_bucket,
        bucket_groups=bucket_groups,
        enlarge=enlarge,
        equal_epochs=equal_epochs,
    )
    return planner.plan(seed, epoch, done)
