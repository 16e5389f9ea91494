"""The same images under different rules, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketRule
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.reports.recommend import differences
from kohya_bucket.reports.summary import Summary, summarize


@dataclass(frozen=True)
class Compared:
    """One rule over the images.

    Attributes:
        name: as asked for.
        summary: its numbers; see `Summary`.
        reasons: how many readable images have no bucket, by reason.
    """

    name: str
    summary: Summary
    reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        return {"rule": self.name, **asdict(self.summary), "reasons": self.reasons}


def compare_rules(rules: Sequence[tuple[str, BucketRule]], sizes: IntArray, batch_size: int = 1) -> list[Compared]:
    """Each rule over [N, 2] sizes; unreadable rows (a side below 1) are left out of all counts."""
    readable = sizes[sizes.min(axis=1, initial=1) > 0]
    repeats = np.ones(len(readable), dtype=np.int64)
    out = []
    for name, rule in rules:
        placement = rule.place(readable)
        reasons = _reasons(placement.reasons[~placement.placed])
        out.append(Compared(name, summarize(readable, placement, repeats, batch_size), reasons))
    return out


def _reasons(numbers: npt.NDArray[Any]) -> dict[str, int]:
    return {Reason(i).text: n for i, n in enumerate(np.bincount(numbers).tolist()) if n}


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
