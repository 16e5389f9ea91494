"""The same images under different rules, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kohya_bucket.buckets import BucketRule, rule_from_name
from kohya_bucket.buckets.trainers import TRAINERS, trainer_rule
from kohya_bucket.buckets.types import IntArray, Reason
from kohya_bucket.errors import ConfigError
from kohya_bucket.reports.summary import Summary, summarize

__all__ = ["COMPARABLE", "GROUPS", "Compared", "comparable_rule", "compare_rules"]

_OWN = ("kohya", "kohya-no-upscale", "kohya-largest", "novelai", "exact", "auto", "auto-optimal")
COMPARABLE = (*_OWN, "preset:NAME", "file:PATH", *TRAINERS)
# Names that stand for several.
GROUPS = {"trainers": tuple(TRAINERS), "all": (*_OWN, *TRAINERS)}


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


def comparable_rule(
    name: str, sizes: IntArray, *, max_reso: tuple[int, int], min_size: int, max_size: int, reso_steps: int,
    **options: Any,
) -> BucketRule:  # fmt: skip
    """A rule by one of the names in `COMPARABLE`.

    Besides the names of `rule_from_name` (whose options these are) there are `kohya-no-upscale`, `kohya-largest`
    (the better no-upscale), `auto-optimal`, and the other trainers at the side of `max_reso`'s area.

    Raises:
        ConfigError, BucketSettingsError: as `rule_from_name` does.
    """
    if name in TRAINERS:
        return trainer_rule(name, round((max_reso[0] * max_reso[1]) ** 0.5))
    if name not in COMPARABLE and not name.startswith(("preset:", "file:")):
        groups = ", ".join(GROUPS)
        raise ConfigError(f"there is no rule {name!r} to compare; there are {', '.join(COMPARABLE)}, and {groups}")
    extra: dict[str, Any] = {}
    if name in ("kohya-no-upscale", "kohya-largest"):
        extra = {"no_upscale": True, "no_upscale_fit": "largest" if name == "kohya-largest" else "kohya"}
        name = "kohya"
    elif name == "auto-optimal":
        extra, name = {"auto_method": "optimal"}, "auto"
    elif name == "exact":
        options.pop("switching", None)
    common: dict[str, Any] = {
        "max_reso": max_reso,
        "min_size": min_size,
        "max_size": max_size,
        "reso_steps": reso_steps,
    }
    return rule_from_name(name, sizes=sizes, **common, **{**options, **extra})


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
