"""Each image and clip of a data set in its bucket."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.buckets.clips import ClipPlacement
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.images.clips import ClipScan, read_clips
from kohya_bucket.images.parallel import Progress
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.config.listing import Listed
from kohya_bucket.musubi.config.model import ClipKeys, DatasetKeys
from kohya_bucket.musubi.plan.items import PlannedItems
from kohya_bucket.musubi.rules import clip_rule, picture_rule, rates_of
from kohya_bucket.texts import counted, some

__all__ = ["PlacedData", "Reading", "place_data"]


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        decode: decode every clip to the end.
        progress: called as `progress(done, total)`.
        metadata_cache: the option of that name.
    """

    decode: bool = False
    progress: Progress | None = None
    metadata_cache: str = "auto"


@dataclass(frozen=True)
class PlacedData:
    """One data set.

    Attributes:
        keys: what the config says of it.
        place: where it is in the config.
        paths: [N] its images or clips.
        items: what is trained of them.
        picture: [N] where each image goes, or the frames of each clip.
        clips: what becomes of each clip; None for images.
        scan: what is known of each clip; None for images.
        left_out: (path, reason) of what is not trained.
    """

    keys: DatasetKeys
    place: str
    paths: list[str]
    items: PlannedItems
    picture: Placement
    clips: ClipPlacement | None
    scan: ClipScan | None
    left_out: tuple[tuple[str, str], ...]


def place_data(
    keys: DatasetKeys, place: str, listed: Listed, architecture: Architecture | None, findings: Findings, how: Reading
) -> PlacedData:
    """Read the headers of a data set's files, and place them.

    Raises:
        BucketSettingsError: keys from which no buckets follow.
    """
    paths = list(listed.paths)
    if isinstance(keys, ClipKeys):
        return _clips(keys, place, paths, architecture, findings, how)
    scan = scan_sizes(paths, how.metadata_cache, how.progress)
    placement = picture_rule(keys, architecture).place(scan.sizes)
    left_out = _left_out(paths, placement.reasons, {i: why for i, _, why in scan.failures})
    _tell(left_out, "image", place, findings)
    kept = np.flatnonzero(placement.placed)
    buckets = [(int(w), int(h)) for w, h in placement.bucket_sizes[kept].tolist()]
    names = [os.path.basename(paths[i]) for i in kept.tolist()]
    items = PlannedItems.of(names, buckets, keys.num_repeats, max(keys.batch_size, 1), placement.crop_loss[kept])
    return PlacedData(keys, place, paths, items, placement, None, None, left_out)


def _clips(
    keys: ClipKeys, place: str, paths: list[str], architecture: Architecture | None, findings: Findings, how: Reading
) -> PlacedData:
    scan = read_clips(paths, decode=how.decode, progress=how.progress)
    placed = clip_rule(keys, architecture).place(scan.sizes, scan.frames, rates_of(keys, architecture, scan.fps))
    left_out = _left_out(paths, placed.reasons, {i: why for i, _, why in scan.failures})
    in_sections = architecture is not None and architecture.in_sections
    sections = np.ones(len(placed.spans), dtype=np.int64)
    if architecture is not None and in_sections:
        latents = architecture.grid.latent_frames(placed.spans.length)
        sections = (latents - 1) // max(keys.fp_latent_window_size, 1)
        short = sorted({paths[i] for i in placed.spans.clip[sections < 1].tolist()})
        if short:
            need = keys.fp_latent_window_size * architecture.grid.stride + architecture.grid.base
            message = f"{counted(len(short), 'clip')} with fewer than {need} frames in an item, at which "
            message += f"{architecture.title} stops: {some(short)}"
            findings.error("short-sections", place, message, f"list target_frames of {need} or more", short)
    _tell(left_out, "clip", place, findings)
    of_item = np.repeat(np.arange(len(sections)), sections)
    names = _item_names(paths, placed, sections, in_sections)
    buckets = [tuple(bucket) for bucket in placed.buckets[placed.bucket_index[of_item]].tolist()]
    loss = placed.picture.crop_loss[placed.spans.clip[of_item]]
    items = PlannedItems.of(names, buckets, keys.num_repeats, max(keys.batch_size, 1), loss, of_clips=True)
    return PlacedData(keys, place, paths, items, placed.picture, placed, scan, left_out)


def _item_names(paths: list[str], placed: ClipPlacement, sections: npt.NDArray[np.int64], numbered: bool) -> list[str]:
    """What the caches of the items are called, but for the size: first frame, frames, and the section if there are."""
    out = []
    spans = placed.spans
    for clip, start, length, count in zip(
        spans.clip.tolist(), spans.start.tolist(), spans.length.tolist(), sections.tolist(), strict=True
    ):
        name = f"{os.path.splitext(os.path.basename(paths[clip]))[0]}_{start:05d}-{length:03d}"
        out += [f"{name}-{section:04d}" for section in range(count)] if numbered else [name]
    return out


def _left_out(
    paths: list[str], reasons: npt.NDArray[np.uint8], unreadable: dict[int, str]
) -> tuple[tuple[str, str], ...]:
    without = np.flatnonzero(reasons != Reason.PLACED).tolist()
    return tuple((paths[i], unreadable.get(i) or Reason(int(reasons[i])).text) for i in without)


def _tell(left_out: tuple[tuple[str, str], ...], what: str, place: str, findings: Findings) -> None:
    """Short clips are one thing, and broken files another."""
    short = [path for path, why in left_out if why == Reason.TOO_SHORT.text]
    if short:
        message = f"{counted(len(short), what)} with fewer frames than the shortest of target_frames: {some(short)}"
        findings.warning("too-short", place, message, "list a shorter length, or leave them out", short)
    rest = [f"{path}: {why}" for path, why in left_out if why != Reason.TOO_SHORT.text]
    if rest:
        message = f"{counted(len(rest), what)} cannot be trained ({some(rest, 1)})"
        findings.warning("not-trained", place, message, "repair or remove", rest)
