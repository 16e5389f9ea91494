"""The same images or clips under different rules, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketRule
from kohya_bucket.buckets.clips import ClipPlacement
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images.clips import ClipScan
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


@dataclass(frozen=True)
class ComparedClips:
    """One rule over the readable clips.

    Attributes:
        buckets, items: in use, and of one epoch.
        frames_kept, frames_dropped: in at least one item or in none, at the rate that the trainer brings clips to.
        seconds_lost: of clips' time that no item has.
        unplaced: clips without an item.
        mean_crop: share of a picture's area that is cropped off, over the clips with an item, if it is scaled to cover
            its bucket; 0 without any.
        reasons: how many clips have no item, by reason.
    """

    name: str
    buckets: int
    items: int
    frames_kept: int
    frames_dropped: int
    seconds_lost: float
    unplaced: int
    mean_crop: float
    reasons: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        out = asdict(self)
        return {"rule": out.pop("name"), **out}


def compare_clips(rules: Sequence[tuple[str, ClipPlacement]], scan: ClipScan) -> list[ComparedClips]:
    """Each rule's name and placement of the clips of a scan; unreadable clips are left out of all counts."""
    readable = scan.frames > 0
    seconds = np.nan_to_num(scan.seconds)
    out = []
    for name, placed in rules:
        left = readable & ~placed.placed
        share = placed.kept / np.maximum(placed.frames, 1)
        crop = placed.picture.crop_loss[placed.placed]
        kept = int(placed.kept.sum())
        out.append(
            ComparedClips(
                name=name,
                buckets=len(placed.buckets),
                items=len(placed.spans),
                frames_kept=kept,
                frames_dropped=int(placed.frames[readable].sum()) - kept,
                seconds_lost=float((seconds * (1 - share))[readable].sum()),
                unplaced=int(left.sum()),
                mean_crop=float(crop.mean()) if len(crop) else 0.0,
                reasons=_reasons(placed.reasons[left]),
            )
        )
    return out
