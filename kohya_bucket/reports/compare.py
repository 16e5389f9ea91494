"""The same images under different rules, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kohya_bucket.buckets import BucketRule
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.reports.summary import Summary, summarize

__all__ = ["Compared", "compare_rules"]


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
        counts = np.bincount(placement.reasons[~placement.placed], minlength=len(Reason))
        reasons = {Reason(i).text: int(n) for i, n in enumerate(counts.tolist()) if n}
        out.append(Compared(name, summarize(readable, placement, repeats, batch_size), reasons))
    return out
