"""What a dataset config of any trainer trains: its datasets and the epoch, for a reader and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kohya_bucket.images.parallel import Progress
from kohya_bucket.planning import RESOLUTION_MODES
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.group import GpuRow
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.wording import rule_text

if TYPE_CHECKING:
    from kohya_bucket.trainers.ai_toolkit.config import JobLength
    from kohya_bucket.trainers.ai_toolkit.plan import JobData
    from kohya_bucket.trainers.door.placed import BucketRow
    from kohya_bucket.trainers.musubi.config import MusubiConfig
    from kohya_bucket.trainers.musubi.plan import PlacedData
    from kohya_bucket.trainers.sdscripts.config import Config
    from kohya_bucket.trainers.sdscripts.config.run_file import RunLength
    from kohya_bucket.trainers.sdscripts.plan import DatasetOverview

_FORMAT = {"format": "kohya-bucket-plan", "version": 1}


@dataclass(frozen=True)
class PlannedData:
    """One dataset.

    Attributes:
        number: which of the config's.
        title: for a reader, and the lines above and below its buckets.
        entry: what `--json` prints of it. Each trainer has a few keys of its own; `buckets` and `not_trained` are
            alike, and what a bucket holds is called `images` or `items`.
        rows: one for each image or clip that is trained.
    """

    number: int
    title: str
    above: Sequence[str]
    entry: Mapping[str, Any]
    below: Sequence[str] = ()
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Plan:
    """What a config trains.

    Attributes:
        head: what `--json` begins with.
        accumulate: batches for one update of the weights.
        unplanned: numbers of the datasets from which no buckets follow.
        length: how long it trains, where the file says so.
    """

    trainer: str
    findings: Findings
    head: Mapping[str, Any]
    datasets: Sequence[PlannedData]
    gpus: Sequence[GpuRow]
    options: AdapterOptions
    accumulate: int
    unplanned: Sequence[int]
    length: RunLength | JobLength | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints, as `plan.schema.json` says. Keys are added; another change makes a new version."""
        return {
            **_FORMAT,
            **self.head,
            "settings": asdict(self.options),
            "datasets": [{"number": data.number, **data.entry} for data in self.datasets],
            "gpus": [row.as_dict() for row in self.gpus],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def plan_sdscripts(
    read: Config, gpus: Sequence[int] | None, accumulate: int | None, images: bool, progress: Progress | None = None
) -> tuple[Plan, bool]:
    """The plan of a config of sd-scripts, with `images` also of each image; whether images have no bucket.

    `gpus` and `accumulate` are, where not given, what the file says.
    """
    from kohya_bucket.trainers.sdscripts.config.run_file import RunLength
    from kohya_bucket.trainers.sdscripts.plan import overview

    length = read.length or RunLength()
    batches = accumulate or length.batches
    gpus = [length.processes] if gpus is None else gpus
    seen = overview(read, read.options, gpus, batches, progress)
    datasets = [_of_dataset(dataset, seen.options, images) for dataset in seen.datasets]
    head = {"config": str(read.path) if read.path else None}
    unplanned = {dataset.config.number for dataset in read.datasets} - {data.number for data in datasets}
    plan = Plan("sd-scripts", read.findings, head, datasets, seen.gpus, seen.options, batches, sorted(unplanned),
                read.length)  # fmt: skip
    return plan, any(data.left_out for data in seen.datasets)


def _of_dataset(dataset: DatasetOverview, options: AdapterOptions, images: bool) -> PlannedData:
    read, placed = dataset.read, dataset.images
    config = read.config
    width, height = config.resolution or (0, 0)
    kind = config.kind.name.lower()
    resolution = f"{width}x{height}" if options.resolutions is None else _resolutions(options)
    rule = rule_text(placed, options, enable_bucket=config.enable_bucket)
    held_back = 0 if read.validation is None else len(read.validation)
    below = [] if read.validation is None else [f"held back for validation: {held_back:,}"]
    at = [f"{size_text(size)}, " for size in options.resolutions or ()] or [""]
    below += [f"{where}{cuts}" for where, cuts in zip(at, dataset.focus_cuts, strict=False)]
    rows = dataset.image_rows() if images else []
    entry = {
        "kind": kind,
        "resolution": config.resolution,
        "batch_size": config.batch_size,
        "enable_bucket": config.enable_bucket,
        "bucket_no_upscale": config.bucket_no_upscale,
        "images": len(placed.keys),
        "samples": sum(row.samples for row in dataset.rows),
        "batches": sum(row.batches for row in dataset.rows),
        "validation_images": held_back,
        "rotated_by_exif": len(dataset.turned),
        "focus": [cuts._asdict() for cuts in dataset.focus_cuts],
        "buckets": [
            {**asdict(row), "bucket": row.bucket.as_tuple(), "aspect": row.bucket.aspect_ratio}
            | {"enlarged": enlarged, "largest_enlargement": most}
            for row, (enlarged, most) in zip(dataset.rows, dataset.enlarged_per_bucket(), strict=True)
        ],
        # those that no bucket takes, and those that `skip_image_resolution` leaves out
        "not_trained": [
            {"image": key, "reason": why, "mend": mend}
            for (key, why), mend in zip(dataset.left_out, dataset.mends, strict=True)
        ]
        + [{"image": key, "reason": why, "mend": {}} for key, why in read.images.skipped],
    }
    if images:
        entry["image_rows"] = rows
    mode = _mode(config.enable_bucket, config.bucket_no_upscale)
    title = f"{kind.replace('_', '-')}, {resolution}, {mode}, batch size {config.batch_size}"
    return PlannedData(config.number, title, [rule, *_subset_lines(dataset)], entry, below, rows)


def size_text(size: Sequence[int]) -> str:
    """`1024x768`, of clips `1024x768x17`."""
    return "x".join(map(str, size))


def _mode(in_buckets: bool, no_upscale: bool) -> str:
    return "one size" if not in_buckets else "no upscaling" if no_upscale else "buckets"


def _resolutions(options: AdapterOptions) -> str:
    weights = options.resolution_weights or ("",) * len(options.resolutions or ())
    sizes = [
        f"{w}x{h}" + (f" ({n})" if n else "") for (w, h), n in zip(options.resolutions or (), weights, strict=True)
    ]
    return f"{', '.join(sizes)} ({RESOLUTION_MODES[options.resolution_mode].text})"


def _subset_lines(dataset: DatasetOverview) -> list[str]:
    lines, images = [], dataset.read.images
    for subset in dataset.read.config.subsets:
        mine = images.subset == subset.number
        times = _times(np.unique(images.repeats[mine]).tolist())
        source = subset.image_dir if subset.metadata_file is None else subset.metadata_file
        count = counted(int(np.count_nonzero(mine)), "image")
        lines.append(f"{source}: {count}{times}{', regularization' * subset.is_reg}")
    return lines


def _times(repeats: list[int]) -> str:
    if not repeats:
        return ""
    if repeats[0] != repeats[-1]:
        return f", {repeats[0]} to {repeats[-1]} times each"
    return ", once each" if repeats[0] == 1 else f", {repeats[0]} times each"


def plan_musubi(
    config: Path, arch: str | None, gpus: Sequence[int], accumulate: int, images: bool, progress: Progress | None = None
) -> Plan:
    """The same of musubi-tuner; what is not trained is among the findings."""
    from kohya_bucket.trainers.musubi.architectures import architecture_named
    from kohya_bucket.trainers.musubi.config import read_config
    from kohya_bucket.trainers.musubi.plan import overview

    read = read_config(config, architecture_named(arch))
    if not read.model.name:
        message = "no model is named, and what is shown holds for every one but HiDream-O1 and MiniMax-H3"
        read.findings.note("no-architecture", "", message, "name it, e.g. --arch wan")
    seen = overview(read, read.options, gpus, accumulate, progress=progress)
    head = {"config": str(read.path), "architecture": read.model.name or None}
    datasets = [_of_data(data, read, images) for data in seen.datasets]
    unplanned = sorted({*range(1, len(read.places) + 1)} - {data.number for data in datasets})
    return Plan("musubi-tuner", read.findings, head, datasets, seen.gpus, seen.options, accumulate, unplanned)


def _of_data(data: PlacedData, read: MusubiConfig, images: bool) -> PlannedData:
    from kohya_bucket.trainers.musubi.plan import seconds_lost

    keys, what = data.keys, data.keys.what
    width, height = keys.resolution
    rows = _clip_rows(data) if images else []
    entry: dict[str, Any] = {
        "kind": f"{what}s",
        **_items_of(data),
    }
    cuts = data.focus_cuts
    if cuts is not None:
        entry["focus"] = [cuts._asdict()]
    if data.clips is not None and data.scan is not None:
        entry |= {
            "frames": int(data.clips.frames.sum()),
            "frames_kept": int(data.clips.kept.sum()),
            "seconds": float(np.nansum(data.scan.seconds)),
            "seconds_lost": seconds_lost(data),
        }
    if images:
        entry["rows"] = rows
    mode = _mode(*keys.mode(read.model))
    title = f"{what}s, {width}x{height}, {mode}, for {read.model.title}, batch size {keys.batch_size}"
    source = f"{keys.directory or keys.jsonl_file}: {counted(len(data.paths), what)}{_times([keys.num_repeats])}"
    above, below = [source, *_clip_lines(data, entry)], [] if cuts is None else [str(cuts)]
    return PlannedData(read.places.index(data.place) + 1, title, above, entry, below, rows)


def _items_of(data: PlacedData | JobData) -> dict[str, Any]:
    """What the entries of trainers that have items have in common."""
    return {
        "keys": asdict(data.keys),
        "files": len(data.paths),
        "items": len(data.items.keys),
        "samples": sum(row.samples for row in data.rows),
        "batches": sum(row.batches for row in data.rows),
        "buckets": [_of_items(row) for row in data.rows],
        "not_trained": [{"path": path, "reason": reason, "mend": {}} for path, reason in data.left_out],
    }


def _of_items(row: BucketRow) -> dict[str, Any]:
    entry = {("items" if name == "images" else name): value for name, value in asdict(row).items()}
    if controls := row.bucket[3:]:
        entry |= {"bucket": row.bucket[:2], "controls": controls}
    return entry


def _clip_lines(data: PlacedData, entry: Mapping[str, Any]) -> list[str]:
    from kohya_bucket.trainers.musubi.keys import ClipKeys

    keys = data.keys
    if not isinstance(keys, ClipKeys) or data.clips is None:
        return []
    lengths = "" if keys.frame_extraction == "full" else f" of {', '.join(map(str, sorted(set(keys.target_frames))))}"
    rate = "" if keys.source_fps is None else f", {keys.source_fps:g} frames per second taken down to the model's rate"
    total, kept = entry["frames"], entry["frames_kept"]
    seconds = f" ({entry['seconds_lost']:,.1f} s)" if entry["seconds"] else ""
    return [
        f"frame_extraction {keys.frame_extraction}{lengths}{rate}",
        f"{counted(len(data.clips.spans), 'item')} with {kept:,} of {total:,} frames; "
        f"{total - kept:,} in none{seconds}",
    ]


def _clip_rows(data: PlacedData) -> list[Mapping[str, Any]]:
    """One for each clip or image that can be read: where it goes, and for a clip what is kept of it."""
    out: list[Mapping[str, Any]] = []
    for i, path in enumerate(data.paths):
        bucket = data.picture.bucket_sizes[i].tolist()
        if not min(bucket):
            continue
        row: dict[str, Any] = {"path": path, "bucket": bucket, "crop_loss": float(data.picture.crop_loss[i])}
        if data.clips is not None and data.scan is not None:
            mine = data.clips.spans.clip == i
            seconds, frames = float(data.scan.seconds[i]), int(data.clips.frames[i])
            kept = int(data.clips.kept[i])
            row |= {
                "size": data.scan.sizes[i].tolist(),
                "frames_in_file": int(data.scan.frames[i]),
                "counted": bool(data.scan.counted[i]),
                "fps": float(data.scan.fps[i]) or None,
                "frames": frames,
                "kept": kept,
                "dropped": frames - kept,
                "seconds_lost": None if np.isnan(seconds) else seconds * (1 - kept / max(frames, 1)),
                "items": data.clips.spans.length[mine].tolist(),
            }
        out.append(row)
    return out


def plan_job(
    path: Path, gpus: Sequence[int], accumulate: int | None, images: bool, progress: Progress | None = None
) -> Plan:
    """The same of a job of ai-toolkit; `accumulate` is, where not given, what the job says."""
    from kohya_bucket.trainers.ai_toolkit.config import read_job
    from kohya_bucket.trainers.ai_toolkit.plan import overview

    job = read_job(path)
    batches = accumulate or job.accumulate
    seen = overview(job, gpus, batches, progress)
    datasets = [_of_job_data(data, job.arch, images) for data in seen.datasets]
    head = {"config": str(path), "architecture": job.arch}
    return Plan("ai-toolkit", job.findings, head, datasets, seen.gpus, seen.options, batches, (), job.length)


def _of_job_data(data: JobData, arch: str, images: bool) -> PlannedData:
    keys = data.keys
    rows = [
        {"path": path, "bucket": bucket, "crop_loss": float(loss), "size": size}
        for path, size, bucket, loss in zip(
            data.paths, data.sizes.tolist(), data.placement.bucket_sizes.tolist(), data.placement.crop_loss, strict=True
        )
        if min(bucket)
    ]
    entry: dict[str, Any] = {
        "kind": "regularization" if keys.is_reg else "images",
        **_items_of(data),
    }
    if images:
        entry["rows"] = rows
    turns = f", each in {len(keys.flips)} turns" if len(keys.flips) > 1 else ""
    source = f"{keys.source}: {counted(len(data.paths), 'file')}{_times([max(keys.num_repeats, 1)])}{turns}"
    kind = "square crops" if keys.square_crop else "buckets"
    title = f"{keys.resolution}x{keys.resolution}, {kind}, for {arch}, "
    title += f"batch size {keys.batch_size}{', regularization' * keys.is_reg}"
    return PlannedData(keys.number, title, [source], entry, (), rows if images else [])
