"""What training with a musubi-tuner config will be: its items placed and planned by the objects that train them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.adapter.lost_time import GpuRow, gpu_rows
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.buckets.clips import ClipPlacement
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.clips import ClipScan, read_clips
from kohya_bucket.images.parallel import Progress
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.config import ClipKeys, DatasetKeys, MusubiConfig
from kohya_bucket.musubi.listing import Listed, list_items
from kohya_bucket.musubi.rules import ANY, clip_rule, picture_rule, rates_of
from kohya_bucket.texts import counted, some

__all__ = ["Overview", "PlacedData", "Reading", "overview", "seconds_lost"]

BucketKey = tuple[int, ...]
"""Width and height, then what else must be equal in a batch: frames of a clip, or sizes of control images."""


@dataclass(frozen=True)
class ItemRow:
    """One bucket, for tables; crop losses are shares of the resized picture."""

    bucket: BucketKey
    items: int
    samples: int
    batches: int
    short_batches: int
    mean_crop_loss: float
    worst_crop_loss: float


@dataclass(frozen=True)
class PlannedItems:
    """N items of one data set.

    Attributes:
        keys: [N] their names.
        repeats: [N] how often an epoch trains each.
        bucket_ids: [N] int32 position of each in `bucket_keys`.
        bucket_keys: [K] sorted.
        batch_size: items per process and step.
        crop_loss: [N] share of the resized picture that is cropped off.
        of_clips: the third number of a bucket is its frames.
    """

    keys: Sequence[str]
    repeats: npt.NDArray[np.int64]
    bucket_ids: IntArray
    bucket_keys: Sequence[BucketKey]
    batch_size: int
    crop_loss: npt.NDArray[np.float64]
    of_clips: bool = False
    no_upscale = False

    @classmethod
    def of(cls, keys: Sequence[str], buckets: Sequence[BucketKey], repeats: int, batch_size: int,
           crop_loss: npt.NDArray[np.float64], of_clips: bool = False) -> PlannedItems:  # fmt: skip
        """N items whose buckets are given one by one."""
        found = sorted(set(buckets))
        position = {bucket: k for k, bucket in enumerate(found)}
        ids = np.array([position[bucket] for bucket in buckets], dtype=np.int32)
        times = np.full(len(keys), max(repeats, 0), dtype=np.int64)
        return cls(keys, times, ids, found, batch_size, crop_loss, of_clips)

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """[K] (width, height)."""
        return [(key[0], key[1]) for key in self.bucket_keys]

    @property
    def frames(self) -> list[int]:
        """[K] frames of a clip, 1 of an image."""
        return [key[2] if self.of_clips else 1 for key in self.bucket_keys]

    @cached_property
    def resolution_of_bucket(self) -> npt.NDArray[Any]:
        """[K] zeros: a cache has one resolution."""
        return np.zeros(len(self.bucket_keys), dtype=np.intp)

    def rows(self) -> list[ItemRow]:
        """One for each bucket."""
        out = []
        for k, key in enumerate(self.bucket_keys):
            mine = self.bucket_ids == k
            samples = int(self.repeats[mine].sum())
            loss, short = self.crop_loss[mine], samples % self.batch_size > 0
            batches = -(-samples // self.batch_size)
            out.append(
                ItemRow(key, int(mine.sum()), samples, batches, int(short), float(loss.mean()), float(loss.max()))
            )
        return out


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


@dataclass(frozen=True)
class Overview:
    """All data sets of a config, and the epoch on each number of GPUs."""

    options: AdapterOptions
    datasets: tuple[PlacedData, ...]
    gpus: tuple[GpuRow, ...]


def overview(
    config: MusubiConfig, options: AdapterOptions, gpus: Sequence[int] = (1,), accumulate: int = 1,
    how: Reading | None = None,
) -> Overview:  # fmt: skip
    """Place and plan what `config` trains; what its files show to be wrong is added to its findings.

    Raises:
        KohyaBucketError: keys or options from which no buckets follow, with the data set's place in the config.
    """
    placed = []
    for keys, place in zip(config.datasets, config.places, strict=True):
        listed = list_items(keys, place, config.findings, config.architecture)
        try:
            data = place_data(keys, place, listed, config.architecture, config.findings, how or Reading())
        except KohyaBucketError as error:
            raise type(error)(f"{place}: {error}") from error
        check_clips(data, config.architecture or ANY, config.findings)
        placed.append(data)
    groups = [data.items for data in placed if len(data.items.keys)]
    if not groups:
        config.findings.error("no-items", "", "nothing can be trained, each for its own reason", "see what is listed")
        return Overview(options, tuple(placed), ())
    planner = GroupPlanner(groups, options)
    frames = np.array([n for items in groups for n in items.frames])
    latents = (config.architecture or ANY).grid.latent_frames(frames)
    costs = np.stack([planner.bucket_sizes.astype(np.int64).prod(axis=1), latents], axis=1).astype(np.int32)
    return Overview(options, tuple(placed), gpu_rows(planner, gpus, accumulate, costs))
