"""Whether one placement of the same images is better than another, by how much, and in what."""

from __future__ import annotations

from kohya_bucket.reports.summary import Summary

__all__ = ["differences", "worth"]


def _short_share(summary: Summary) -> float:
    return summary.short_batches / summary.batches if summary.batches else 0.0


def _unplaced_share(summary: Summary) -> float:
    return summary.unplaced / max(summary.placed + summary.unplaced, 1)


def worth(before: Summary, after: Summary) -> float:
    """How much a change is worth; 0 or less: do not mention it.

    In units of one percentage point of crop loss. An image that is not trained at all counts like one that is
    cropped away, an enlarged one like 10% cropped, a batch that is not full like 8%. 1% more pixels trained count
    like 0.2%; fewer hardly count, since a lower resolution is a choice.
    """
    more = after.mean_pixels / before.mean_pixels - 1 if before.mean_pixels else 0.0
    gains = (
        100 * (before.mean_crop - after.mean_crop),
        25 * (before.p95_crop - after.p95_crop),
        10 * (before.enlarged - after.enlarged),
        8 * (_short_share(before) - _short_share(after)),
        100 * (_unplaced_share(before) - _unplaced_share(after)),
        (20 if more > 0 else 2) * more,
    )
    matters = max(gains[0] - 0.1, gains[1] - 0.25, gains[2] - 0.3, gains[3] - 0.6, gains[4], gains[5] - 0.5)
    return sum(gains) if matters > 0 else 0.0


def differences(before: Summary, after: Summary) -> tuple[str, str]:
    """What gets better and what gets worse, as text."""
    lines: tuple[list[str], list[str]] = ([], [])

    def note(better: bool, text: str) -> None:
        lines[0 if better else 1].append(text)

    for name, old, new, floor in (
        ("mean crop loss", before.mean_crop, after.mean_crop, 0.0005),
        ("95th percentile of crop loss", before.p95_crop, after.p95_crop, 0.002),
        ("worst crop loss", before.worst_crop, after.worst_crop, 0.01),
        ("enlarged images", before.enlarged, after.enlarged, 0.002),
    ):
        if abs(old - new) >= floor and before.placed and after.placed:
            note(new < old, f"{name} {_percent(old)} → {_percent(new)}")
    if before.unplaced != after.unplaced:
        note(after.unplaced < before.unplaced, f"images without a bucket {before.unplaced:,} → {after.unplaced:,}")
    old, new = _short_share(before), _short_share(after)
    if abs(old - new) >= 0.002 and before.placed and after.placed:
        text = f"batches that are not full {before.short_batches:,} of {before.batches:,}"
        note(new < old, f"{text} → {after.short_batches:,} of {after.batches:,}")
    if before.mean_pixels and abs(after.mean_pixels / before.mean_pixels - 1) >= 0.01:
        text = f"pixels trained per image {before.mean_pixels / 1e6:.2f} → {after.mean_pixels / 1e6:.2f} million"
        note(after.mean_pixels > before.mean_pixels, text)
    return "; ".join(lines[0]), "; ".join(lines[1])


def _percent(share: float) -> str:
    if share == 0:
        return "0%"
    return f"{100 * share:.2f}%" if share < 0.1 else f"{100 * share:.1f}%"
