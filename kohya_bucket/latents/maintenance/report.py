"""What was done to a store."""

from __future__ import annotations

from dataclasses import dataclass, field

from kohya_bucket.latents.encode.report import PrecomputeReport

__all__ = ["MaintenanceReport"]


@dataclass
class MaintenanceReport:
    """What was done.

    Attributes:
        copied: items that were moved into new shards.
        dropped: items that are gone from the store.
        removed: files that were deleted or put into quarantine.
        in_use: files that could not be removed, because a program holds them open.
        damaged: (item or file, what was wrong with it).
        missing: sources of items that are lost and were not encoded again.
        encoded: reports of what was encoded again.
        freed: bytes.
    """

    copied: int = 0
    dropped: int = 0
    removed: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    encoded: list[PrecomputeReport] = field(default_factory=list)
    freed: int = 0
