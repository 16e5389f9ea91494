"""What a report says of clips, beside where their frames go as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kohya_bucket.buckets.clips import ClipPlacement
from kohya_bucket.images.clips import ClipScan
from kohya_bucket.texts import counted, some

__all__ = ["ClipFacts"]


@dataclass(frozen=True)
class ClipFacts:
    """N clips of a report's subject, whose pictures are its images.

    Attributes:
        scan: what is known of each.
        placement: the items that are trained of them; None where no config says which frames are taken.
    """

    scan: ClipScan
    placement: ClipPlacement | None = None

    def lines(self) -> list[str]:
        """For a reader."""
        frames = self.scan.frames[self.scan.frames > 0]
        if not len(frames):
            return []
        rates = sorted({f"{rate:.5g}" for rate in self.scan.fps.tolist() if rate > 0}, key=float)
        text = f"{int(frames.sum()):,} frames in {np.nansum(self.scan.seconds):,.1f} s; a clip has {frames.min():,} to "
        text += f"{frames.max():,} of them (median {np.median(frames):,.0f})"
        out = [text + (f", {some(rates, 6)} per second" if rates else "")]
        if self.scan.counted.any():
            out.append(f"The frames of {counted(int(self.scan.counted.sum()), 'clip')} were counted by decoding")
        if self.scan.rotation.any():
            turned = counted(int((self.scan.rotation != 0).sum()), "clip")
            out.append(f"{turned} that players turn, and training takes as stored")
        if self.placement is not None:
            told = self.as_dict()
            short = int((~self.placement.placed & (self.scan.frames > 0)).sum())
            out.append(
                f"{counted(told['items'], 'item')} with {told['frames_kept']:,} of {told['frames']:,} frames; "
                f"{told['seconds_lost']:,.1f} s in no item; {counted(short, 'clip')} too short for any"
            )
            shapes = zip(self.placement.buckets.tolist(), self.placement.items_per_bucket.tolist(), strict=True)
            out.append("Items: " + ", ".join(f"{'x'.join(map(str, shape))} {n:,}" for shape, n in shapes))
        return out

    def as_dict(self) -> dict[str, Any]:
        """For JSON; frames are those that are left at the rate that is trained."""
        scan, placed = self.scan, self.placement
        out: dict[str, Any] = {
            "clips": len(scan),
            "frames_in_files": int(scan.frames.sum()),
            "seconds": float(np.nansum(scan.seconds)),
            "counted": int(scan.counted.sum()),
            "rotated": int((scan.rotation != 0).sum()),
        }
        if placed is not None:
            lost = np.nan_to_num(scan.seconds) * (1 - placed.kept / np.maximum(placed.frames, 1))
            out |= {
                "items": len(placed.spans),
                "frames": int(placed.frames.sum()),
                "frames_kept": int(placed.kept.sum()),
                "seconds_lost": float(lost[placed.frames > 0].sum()),
                "buckets": [
                    {"bucket": shape, "items": n}
                    for shape, n in zip(placed.buckets.tolist(), placed.items_per_bucket.tolist(), strict=True)
                ],
            }
        return out
