"""What `plan` shows of a dataset config of any trainer: one plan as tables for a reader, or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich import box
from rich.console import Console

from kohya_bucket.cli.console import print_table, say, say_first, scan_progress, wide_console
from kohya_bucket.images.headers import say_orientations
from kohya_bucket.planning import RESOLUTION_MODES
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.door.group import GpuRow
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.wording import rule_text

if TYPE_CHECKING:
    from kohya_bucket.trainers.musubi.config import MusubiConfig
    from kohya_bucket.trainers.musubi.plan import PlacedData
    from kohya_bucket.trainers.sdscripts.config import Config
    from kohya_bucket.trainers.sdscripts.config.run_file import RunLength
    from kohya_bucket.trainers.sdscripts.plan import DatasetOverview


_FORMAT = {"format": "kohya-bucket-plan", "version": 1}
_RULED: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}


@dataclass(frozen=True)
class PlannedData:
    """One data set.

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
        unplanned: numbers of the data sets from which no buckets follow.
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
    length: RunLength | None = None

    def show(self, images: bool, as_json: bool) -> None:
        """Print it, with `images` also each image and all names that findings are about."""
        if as_json:
            typer.echo(json.dumps(self.as_dict(), indent=2))
            return
        console = wide_console()
        for data in self.datasets:
            _print_data(console, data, images)
        if self.gpus:
            _print_gpus(console, self.gpus, self.accumulate, self.trainer)
        if self.length is not None:
            for row in self.gpus:
                where = f"on {counted(row.gpus, 'GPU')}: " if len(self.gpus) > 1 else ""
                say(where + self.length.text(row.updates))
        if len(self.findings):
            console.print()
            _print_findings(console, self.findings, self.trainer, images)
        if self.unplanned:
            what = "dataset" if len(self.unplanned) == 1 else "datasets"
            say(f"not planned, because of that: {what} {', '.join(map(str, self.unplanned))}")

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
    read: Config, gpus: Sequence[int] | None, accumulate: int | None, images: bool, *, quiet: bool = False
) -> tuple[Plan, bool]:
    """The plan of a config of sd-scripts, with `images` also of each image; whether images have no bucket.

    `gpus` and `accumulate` are, where not given, what the file says.
    """
    from kohya_bucket.trainers.sdscripts.config.run_file import RunLength
    from kohya_bucket.trainers.sdscripts.plan import overview

    length = read.length or RunLength()
    batches = accumulate or length.batches
    gpus = [length.processes] if gpus is None else gpus
    with scan_progress("reading image headers", quiet=quiet) as progress:
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
    prescribed = read.images.predefined is not None
    rule = rule_text(placed, options, enable_bucket=config.enable_bucket, prescribed=prescribed)
    held_back = 0 if read.validation is None else len(read.validation)
    below = [] if read.validation is None else [f"held back for validation: {held_back:,}"]
    if dataset.turned:
        asked = say_orientations(dataset.turned)
        below.append(f"with an EXIF turn or mirroring, which sd-scripts ignores: {len(dataset.turned):,} ({asked})")
    at = [f"{_size(size)}, " for size in options.resolutions or ()] or [""]
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
    config: Path, arch: str | None, gpus: Sequence[int], accumulate: int, images: bool, *, quiet: bool = False
) -> Plan:
    """The same of musubi-tuner; what is not trained is among the findings."""
    from kohya_bucket.trainers.musubi.architectures import architecture_named
    from kohya_bucket.trainers.musubi.config import read_config
    from kohya_bucket.trainers.musubi.plan import overview

    read = read_config(config, architecture_named(arch))
    if not read.model.name:
        message = "no model is named, and what is shown holds for every one but HiDream-O1 and MiniMax-H3"
        read.findings.note("no-architecture", "", message, "name it, e.g. --arch wan")
    with scan_progress("reading images and clips", quiet=quiet) as progress:
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
        "keys": asdict(keys),
        "files": len(data.paths),
        "items": len(data.items.keys),
        "samples": sum(row.samples for row in data.rows),
        "batches": sum(row.batches for row in data.rows),
        "buckets": [{("items" if k == "images" else k): v for k, v in asdict(row).items()} for row in data.rows],
        "not_trained": [{"path": path, "reason": reason, "mend": {}} for path, reason in data.left_out],
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


def _print_data(console: Console, data: PlannedData, images: bool) -> None:
    console.print()
    console.print(f"[bold]Dataset {data.number}[/bold]: {data.title}")
    for line in data.above:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    _print_buckets(console, data.entry)
    for line in data.below:
        console.print(line, markup=False, soft_wrap=True)
    if left_out := data.entry["not_trained"]:
        console.print(f"[yellow]not trained: {len(left_out):,}[/yellow]")
        lines = [f"{row.get('image') or row['path']}: {row['reason']}" for row in left_out]
        say_first(lines, len(lines) if images else 20, " (--images lists all)")
    if any("cut" in row for row in data.rows[:1]):
        console.print(
            f"{'size':>11} {'bucket':>10} {'resized':>11} {'cut left,top,right,bottom':>26} {'crop':>6}  image"
        )
    for row in data.rows:
        console.print(_row_line(row), markup=False, soft_wrap=True)


def _row_line(row: Mapping[str, Any]) -> str:
    bucket, loss = f"{_size(row['bucket']):>10}", f"{row['crop_loss']:>6.1%}"
    if "cut" in row:
        cut = ",".join(map(str, row["cut"]))
        return f"{_size(row['size']):>11} {bucket} {_size(row['resized']):>11} {cut:>26} {loss}  {row['key']}"
    if "items" not in row:
        return f"{bucket} {loss}  {row['path']}"
    lost = "" if row["seconds_lost"] is None else f" {row['seconds_lost']:.2f} s"
    items = counted(len(row["items"]), "item")
    kept = f"{row['frames']:>5} frames, {row['dropped']:>4} in no item{lost:>9}, {items:>9}"
    return f"{bucket} {loss} {kept}  {row['path']}"


def _size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _print_buckets(console: Console, entry: Mapping[str, Any]) -> None:
    rows, what = entry["buckets"], "images" if "images" in entry else "items"
    if not rows:
        console.print("nothing is trained")
        return
    sums = what, "samples", "batches", "short_batches", "enlarged"
    total = {name: sum(row[name] for row in rows) for name in sums if name in rows[0]}
    most = "worst_crop_loss", "largest_enlargement"
    total |= {name: max(row[name] for row in rows) for name in most if name in rows[0]}
    total["mean_crop_loss"] = sum(row["mean_crop_loss"] * row[what] for row in rows) / total[what]
    cells = [_bucket_cells(row, what) for row in (*rows, {**total, what: entry[what], "bucket": f"all {len(rows)}"})]
    console.print()
    print_table(console, cells, left=0, spare=("aspect", "short", "samples", "batches"), total=True, **_RULED)


def _bucket_cells(row: Mapping[str, Any], what: str) -> dict[str, str]:
    size = row["bucket"]
    of_all = isinstance(size, str)
    cells = {"bucket": size if of_all else _size(size), "aspect": "" if of_all else f"{size[0] / size[1]:.3f}"}
    cells |= {name: f"{row[name]:,}" for name in (what, "samples", "batches")}
    cells["short"] = f"{row['short_batches']:,}" if row["short_batches"] else ""
    cells |= {"cut": f"{row['mean_crop_loss']:.1%}", "worst": f"{row['worst_crop_loss']:.1%}"}
    if "enlarged" in row:
        up = row["enlarged"]
        cells["enlarged\n(up to)"] = f"{up:,} ({row['largest_enlargement']:.3g}x)" if up else ""
    return cells


def _print_gpus(console: Console, rows: Sequence[GpuRow], accumulate: int, trainer: str) -> None:
    """The epoch on each number of GPUs, beside what the trainer would do alone."""
    console.print()
    console.print("[bold]An epoch[/bold]" + (f", {accumulate} batches per update" if accumulate > 1 else ""))
    cells = []
    for row in rows:
        line = {"GPUs": f"{row.gpus}", "steps": f"{row.steps:,}"}
        line |= {"updates": f"{row.updates:,}"} if accumulate > 1 else {}
        line |= {name: f"{getattr(row, name):,}" for name in ("samples", "missed", "repeated")}
        cells.append(line | {"idle": f"{row.idle:.1%}", f"idle in {trainer} alone": f"{row.idle_independent:.1%}"})
    console.print()
    print_table(console, cells, left=0, spare=("samples",), **_RULED)
    if all(row.gpus != 1 for row in rows):
        console.print("samples and batches of the buckets above are those of one GPU", style="dim", soft_wrap=True)
    for row in rows:
        if row.missed or row.repeated or row.moved:
            console.print(f"{counted(row.gpus, 'GPU')}: {row.ledger}", soft_wrap=True)
        if row.left_over:
            console.print(f"{counted(row.gpus, 'GPU')}: {row.left_over}", markup=False, soft_wrap=True)


def _print_findings(console: Console, findings: Findings, trainer: str, names: bool) -> None:
    """The findings, and below them what stops the trainer; with `names` all that each is about."""
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for finding in sorted(findings, key=lambda finding: finding.severity is Severity.ERROR):
        stops = finding.severity is Severity.ERROR
        who = "kohya_bucket" if finding.code == "settings" else trainer
        title = f"{who} stops" if stops else finding.severity.value
        console.print(f"{title}: ", style=styles[finding.severity.value], end="")
        console.print(finding.text, markup=False, soft_wrap=True)
        # The text names the first few.
        for name in finding.names if names and len(finding.names) > 3 else ():
            console.print(f"    {name}", markup=False, soft_wrap=True)
