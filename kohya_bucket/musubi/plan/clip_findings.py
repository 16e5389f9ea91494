"""What clips' files show: rates that differ from what the config says, frames that nobody trains, rotations."""

from __future__ import annotations

import numpy as np

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.config.model import ClipKeys
from kohya_bucket.musubi.plan.placing import PlacedData
from kohya_bucket.texts import counted, some

__all__ = ["check_clips", "seconds_lost"]

_SAME_RATE = 0.01
_MUCH = 0.5


def seconds_lost(data: PlacedData) -> float:
    """Seconds of readable clips that no item has; frames that are dropped to change the rate are not lost."""
    if data.clips is None or data.scan is None:
        return 0.0
    frames = np.maximum(data.clips.frames, 1)
    seconds = np.nan_to_num(data.scan.seconds)
    return float((seconds * (1 - data.clips.kept / frames))[data.clips.frames > 0].sum())


def check_clips(data: PlacedData, architecture: Architecture, findings: Findings) -> None:
    """Add what the files of a data set of clips show."""
    keys, scan, clips = data.keys, data.scan, data.clips
    if not isinstance(keys, ClipKeys) or scan is None or clips is None:
        return
    _check_rates(keys, data, architecture, findings)
    turned = [scan.paths[i] for i in np.flatnonzero(scan.rotation).tolist()]
    if turned:
        message = f"{counted(len(turned), 'clip')} that players turn, and musubi-tuner does not: {some(turned)}"
        findings.warning("rotated", data.place, message, "encode them anew, or train them lying on their side", turned)
    counted_clips = [scan.paths[i] for i in np.flatnonzero(scan.counted).tolist()]
    if counted_clips:
        message = f"the frames of {counted(len(counted_clips), 'clip')} were counted by decoding: {some(counted_clips)}"
        findings.note("counted", data.place, message, "their containers do not say how many there are", counted_clips)
    total = float(np.nansum(scan.seconds))
    lost = seconds_lost(data)
    if lost > _MUCH * total > 0:
        message = f"{lost:,.1f} of {total:,.1f} seconds are in no item"
        remedy = "list more target_frames, or use frame_extraction = 'chunk' or 'slide'"
        findings.warning("seconds-lost", data.place, message, remedy)


def _check_rates(keys: ClipKeys, data: PlacedData, architecture: Architecture, findings: Findings) -> None:
    expected = keys.source_fps or architecture.target_fps
    if data.scan is None or expected is None or architecture.by_time:
        return
    fps = data.scan.fps
    other = np.flatnonzero((fps > 0) & (np.abs(fps - expected) > _SAME_RATE * expected)).tolist()
    if not other:
        return
    names = [data.scan.paths[i] for i in other]
    rates = sorted({f"{fps[i]:.5g}" for i in other}, key=float)
    have = f"{counted(len(names), 'clip')} {'has' if len(names) == 1 else 'have'} {some(rates)} frames per second"
    if keys.source_fps is not None:
        message = f"source_fps is {keys.source_fps}, but {have}, and will move too fast or too slow: {some(names)}"
        findings.warning("source-fps", data.place, message, "a data set for each rate, with its source_fps", names)
    else:
        message = f"{architecture.title} trains {expected:g} frames per second; {have}, and every frame is taken"
        remedy = f"to drop frames, set source_fps = {float(rates[0])}"
        findings.note("source-fps", data.place, message, remedy, names)
