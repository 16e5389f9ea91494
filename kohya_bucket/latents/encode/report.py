"""What a run of `precompute` did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kohya_bucket.latents.remote.remote_path import Place

__all__ = ["PrecomputeReport", "joined"]


@dataclass
class PrecomputeReport:
    """What a run did.

    Attributes:
        output: the store's folder, or of the npz files (None: beside the images).
        total: items that have a bucket.
        current: of these, how many were there already.
        encoded: encoded by this process.
        elsewhere: encoded by other processes meanwhile.
        failed: (path, reason) of images this process could not encode.
        without_bucket: (path, reason) of images that have no bucket.
        reasons: how many items were to do, by reason.
        notes: what a user should know: smaller batches, float32 retries, images that would share a file.
        buckets: (bucket size, number of items) of everything that is there now.
        seconds: how long it took; `device_idle`: how much of that no batch was in the encoder.
    """

    output: Place | None
    total: int
    current: int = 0
    encoded: int = 0
    elsewhere: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    without_bucket: list[tuple[str, str]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    buckets: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    seconds: float = 0.0
    device_idle: float = 0.0


def joined(reports: Sequence[PrecomputeReport]) -> PrecomputeReport:
    """One report of several runs into the same place, one or more; an image counts once for each run it was in."""
    reasons: Counter[str] = Counter()
    buckets: Counter[tuple[int, int]] = Counter()
    for report in reports:
        reasons.update(report.reasons)
        buckets.update(dict(report.buckets))
    return PrecomputeReport(
        reports[0].output,
        sum(r.total for r in reports),
        sum(r.current for r in reports),
        sum(r.encoded for r in reports),
        sum(r.elsewhere for r in reports),
        [failure for r in reports for failure in r.failed],
        [image for r in reports for image in r.without_bucket],
        dict(reasons),
        [note for r in reports for note in r.notes],
        sorted(buckets.items()),
        sum(r.seconds for r in reports),
        sum(r.device_idle for r in reports),
    )
