"""One piece of advice, with what it was measured to change."""

from __future__ import annotations

from dataclasses import dataclass

from kohya_bucket.reports.summary import Summary

__all__ = ["Recommendation"]


@dataclass(frozen=True)
class Recommendation:
    """One change and what it does to this data set.

    Attributes:
        setting: the key to change, as sd-scripts or the command line names it, or "files" for the images themselves.
        current, proposed: its value now and the one to try.
        why: what is wrong now, in one sentence.
        gain, cost: what gets better and what gets worse, measured; `cost` may be empty.
        before, after: the placements in numbers.
    """

    setting: str
    current: str
    proposed: str
    why: str
    gain: str
    cost: str
    before: Summary
    after: Summary
