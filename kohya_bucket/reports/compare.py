"""The same images under several rules: what each crops, and what is trained of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kohya_bucket.buckets import BucketRule, Placement
from kohya_bucket.buckets.choices import TRAINERS
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.originals.loaders import LOADERS, LoaderRun, run_loader
from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.recommend import differences
from kohya_bucket.reports.summary import Summary, summarize
from kohya_bucket.trainers.door.group import epoch_of
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.door.subject import ImageTable, Subject


@dataclass(frozen=True)
class Compared:
    """One rule over the images.

    Attributes:
        name: as asked for.
        summary: its numbers; see `Summary`. Its batches are those of this package's plan.
        reasons: how many readable images have no bucket, by reason.
        trained: what becomes of the placed images in the trainer's own loader, or in this package's plan.
    """

    name: str
    summary: Summary
    reasons: dict[str, int]
    trained: LoaderRun | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        trained = None if self.trained is None else asdict(self.trained)
        return {"rule": self.name, **asdict(self.summary), "reasons": self.reasons, "trained": trained}


def compare_rules(
    rules: Sequence[tuple[str, BucketRule]], sizes: IntArray, batch_size: int = 1, gpus: int = 1
) -> list[Compared]:
    """Each rule over [N, 2] sizes; unreadable rows (a side below 1) are left out of all counts."""
    readable = sizes[sizes.min(axis=1, initial=1) > 0]
    images = ImageTable.sized([""] * len(readable), readable)
    out = []
    for name, rule in rules:
        placement = rule.place(readable)
        counts = Subject(name, images, rule, batch_size).counts(placement, rule)
        missed = np.bincount(placement.reasons[~placement.placed]).tolist()
        reasons = {Reason(i).text: n for i, n in enumerate(missed) if n}
        trained = _trained(name, placement, batch_size, gpus)
        out.append(Compared(name, summarize(readable, placement, counts), reasons, trained))
    return out


_LOADED = 300_000  # images of all epochs of a loader together, which takes some seconds


def _trained(name: str, placement: Placement, batch_size: int, gpus: int) -> LoaderRun | None:
    """What the trainer of a rule makes of the placed images; None where its loader is not known here."""
    kept = placement.placed
    if not kept.any():
        return None
    if name in LOADERS:
        of_bucket, ids = np.unique(placement.bucket_sizes[kept], axis=0, return_inverse=True)
        epochs = max(1, min(10, _LOADED // len(ids)))
        return run_loader(name, ids.reshape(-1), of_bucket.prod(axis=1), batch_size, gpus, epochs)
    if name in TRAINERS:
        return None
    names = [str(i) for i in range(len(kept))]
    images = PlacedDataset(names, np.ones(len(kept), dtype=np.int64), placement, batch_size)
    _, (row,) = epoch_of([images.trained], AdapterOptions(), [gpus], 1)
    return LoaderRun(1, row.steps, row.missed, len(row.never_trained), row.repeated, row.idle)


_MOST_IN_REPORT = 100_000  # images: eight loaders take three seconds of an epoch of so many
_LOADED_IN_REPORT = 30_000  # as `_LOADED`


def trained_on(analysis: Analysis) -> list[tuple[str, float, float, int, float]]:
    """(name, steps, left out, never trained, repeated) of an epoch on one GPU: of the plan, and of each trainer's own
    loader if it had the same buckets.

    Empty where loaders do not differ or cannot be shown: batches of one image, of a budget or of clips; and where they
    would take minutes.
    """
    subject, placement = analysis.subject, analysis.placement
    kept = placement.placed
    repeats = analysis.images.repeats[kept]
    asked = int(repeats.sum())
    if subject.batch_size < 2 or subject.options.has_budget or subject.clips or not 0 < asked <= _MOST_IN_REPORT:
        return []
    of_bucket, ids = np.unique(placement.bucket_sizes[kept], axis=0, return_inverse=True)
    counts = analysis.counts
    more = int(counts.samples.sum()) - asked
    out = [("this plan", float(counts.batches.sum()), float(max(-more, 0)), 0, float(max(more, 0)))]
    epochs = max(1, min(10, _LOADED_IN_REPORT // asked))
    for name in LOADERS:
        run = run_loader(
            name, ids.reshape(-1), of_bucket.prod(axis=1), subject.batch_size, epochs=epochs, repeats=repeats
        )
        out.append((name, run.steps, run.left_out, run.never, run.repeated))
    return out


def conclusion(results: Sequence[Compared]) -> str:
    """Which rule loses least, and what that gains and costs against the first one.

    An image without a bucket counts as lost whole.
    """

    def lost(one: Compared) -> float:
        s = one.summary
        return (s.mean_crop * s.placed + s.unplaced) / max(s.placed + s.unplaced, 1)

    first, best = results[0], min(results, key=lost)
    if best is first:
        return f"{first.name} loses least: {lost(first):.2%}"
    gain, cost = differences(first.summary, best.summary)
    text = f"{best.name} loses least: {lost(best):.2%}, and {first.name} {lost(first):.2%}"
    better = f". Better than {first.name}: {gain}" if gain else ""
    return text + better + (f". Worse: {cost}" if cost else "")
