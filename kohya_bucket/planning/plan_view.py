"""A plan as notebooks show it: steps and images of each bucket, and the ledger in one line."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.html_view import bars, fullest, view
from kohya_bucket.planning.ledger import Ledger
from kohya_bucket.planning.mixed_steps import MixedSteps

__all__ = ["as_html"]


def as_html(
    title: str,
    ledger: Ledger,
    length: npt.NDArray[np.int32],
    bucket_of_step: npt.NDArray[np.int32],
    mixed: MixedSteps,
    global_batch: npt.NDArray[np.int64],
    world_size: int,
) -> str:
    """One piece of HTML. The arguments are those of `EpochPlan`."""
    k, one = len(global_batch), bucket_of_step >= 0
    rows = -1 - bucket_of_step[~one]
    bucket, own = bucket_of_step[one], length[one]
    steps = np.bincount(bucket, minlength=k)
    samples = np.bincount(bucket, weights=np.maximum(own, world_size), minlength=k).astype(np.int64)
    in_mixed = np.bincount(mixed.bucket[rows].reshape(-1), weights=mixed.images[rows].reshape(-1), minlength=k)
    samples += in_mixed.astype(np.int64)
    short = np.bincount(bucket[own < global_batch[bucket]], minlength=k)
    shown = fullest(samples.tolist())
    names = [ledger.bucket_name(i) for i in shown]
    table = [(name, *(f"{n[i]:,}" for n in (steps, samples, short))) for name, i in zip(names, shown, strict=True)]
    notes = [ledger.text]
    if len(rows):
        notes.append(f"in {len(rows):,} steps more, ranks train batches of several buckets")
    if (hidden := int(np.count_nonzero(samples)) - len(shown)) > 0:
        notes.append(f"{hidden:,} smaller buckets are not shown")
    header = ("bucket", "steps", "images", "short batches")
    return view(title, notes, header, table, bars(names, samples[shown].tolist(), "images"))
