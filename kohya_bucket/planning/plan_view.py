"""A plan as notebooks show it: steps and images of each bucket, and the ledger in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kohya_bucket.html_view import bars, fullest, view

if TYPE_CHECKING:
    from kohya_bucket.planning.plan import EpochPlan

__all__ = ["as_html"]


def as_html(plan: EpochPlan) -> str:
    """One piece of HTML."""
    k, one = len(plan.global_batch), plan.bucket_of_step >= 0
    bucket, length = plan.bucket_of_step[one], plan.length[one]
    rows = -1 - plan.bucket_of_step[~one]
    steps = np.bincount(bucket, minlength=k)
    samples = np.bincount(bucket, weights=np.maximum(length, plan.world_size), minlength=k).astype(np.int64)
    mixed_buckets, mixed_images = plan.mixed.bucket[rows].reshape(-1), plan.mixed.images[rows].reshape(-1)
    samples += np.bincount(mixed_buckets, weights=mixed_images, minlength=k).astype(np.int64)
    short = np.bincount(bucket[length < plan.global_batch[bucket]], minlength=k)
    ledger, shown = plan.ledger(), fullest(samples.tolist())
    names = [ledger.bucket_name(i) for i in shown]
    table = [(name, *(f"{n[i]:,}" for n in (steps, samples, short))) for name, i in zip(names, shown, strict=True)]
    notes = [ledger.text]
    if len(rows):
        notes.append(f"in {len(rows):,} steps more, ranks train batches of several buckets")
    if (hidden := int(np.count_nonzero(samples)) - len(shown)) > 0:
        notes.append(f"{hidden:,} smaller buckets are not shown")
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
    title = f"epoch {plan.epoch}, seed {plan.seed}: {plan.steps:,} steps on {ranks}"
    header = ("bucket", "steps", "images", "short batches")
    return view(title, notes, header, table, bars(names, samples[shown].tolist(), "images"))
