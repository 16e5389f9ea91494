"""What `plan` prints: tables for a reader, or JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kohya_bucket.adapter.lost_time import GpuRow
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.cli.console import print_fitting, print_table, wide_console
from kohya_bucket.cli.plan_json import not_trained, plan_as_dict
from kohya_bucket.images.headers import say_orientations
from kohya_bucket.planning import RESOLUTION_MODES
from kohya_bucket.sdscripts.config import Config, Findings
from kohya_bucket.sdscripts.plan import DatasetOverview, Overview
from kohya_bucket.sdscripts.wording import rule_text
from kohya_bucket.texts import counted

__all__ = ["bucket_table", "findings_table", "gpu_table", "lost_table", "show_findings", "show_plan"]

_LIMIT = 20


def show_findings(read: Config, names: bool, as_json: bool) -> None:
    """What is wrong with a config of which nothing can be planned; with `names` all images that are concerned."""
    if as_json:
        typer.echo(json.dumps({"findings": [f.as_dict() for f in read.findings]}, indent=2))
    else:
        findings_table(wide_console(), read.findings, names)


def show_plan(read: Config, seen: Overview, images: bool, accumulate: int, as_json: bool) -> None:
    """The data sets, their epochs and the findings; with `images` also each image."""
    if as_json:
        typer.echo(json.dumps(plan_as_dict(read, seen, images), indent=2))
        return
    console = wide_console()
    for number, dataset in enumerate(seen.datasets, 1):
        _print_dataset(console, number, dataset, seen.options, images)
    if seen.gpus:
        gpu_table(console, seen.gpus, accumulate, "sd-scripts")
        lost_table(console, seen.gpus, seen.options.model)
    if len(read.findings):
        console.print()
        findings_table(console, read.findings, images)


def findings_table(console: Console, findings: Findings, names: bool) -> None:
    """The findings, the worst first; with `names` all that each is about."""
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for finding in findings:
        console.print(f"{finding.severity.value}: ", style=styles[finding.severity.value], end="")
        console.print(finding.text, markup=False, soft_wrap=True)
        # The text names the first few.
        for name in finding.names if names and len(finding.names) > 3 else ():
            console.print(f"    {name}", markup=False, soft_wrap=True)


def _resolutions(adapter: AdapterOptions) -> str:
    weights = adapter.resolution_weights or ("",) * len(adapter.resolutions or ())
    sizes = [
        f"{w}x{h}" + (f" ({n})" if n else "") for (w, h), n in zip(adapter.resolutions or (), weights, strict=True)
    ]
    return f"{', '.join(sizes)} ({RESOLUTION_MODES[adapter.resolution_mode].text})"


def _print_dataset(
    console: Console, number: int, dataset: DatasetOverview, adapter: AdapterOptions, images: bool
) -> None:
    config = dataset.read.config
    width, height = config.resolution or (0, 0)
    mode = "one size" if not config.enable_bucket else "no upscaling" if config.bucket_no_upscale else "buckets"
    kind = config.kind.name.lower().replace("_", "-")
    resolution = f"{width}x{height}" if adapter.resolutions is None else _resolutions(adapter)
    console.print()
    console.print(f"[bold]Dataset {number}[/bold]: {kind}, {resolution}, {mode}, batch size {config.batch_size}")
    prescribed = dataset.read.images.predefined is not None
    console.print(f"  {rule_text(dataset.images, adapter, enable_bucket=config.enable_bucket, prescribed=prescribed)}")
    _subset_lines(console, dataset)
    _bucket_table(console, dataset)
    if dataset.read.validation is not None:
        console.print(f"held back for validation: {len(dataset.read.validation):,}")
    if dataset.turned:
        asked = say_orientations(dataset.turned)
        console.print(f"with an EXIF turn or mirroring, which sd-scripts ignores: {len(dataset.turned):,} ({asked})")
    left_out = not_trained(dataset)
    if left_out:
        console.print(f"[yellow]not trained: {len(left_out):,}[/yellow]")
        shown = left_out if images else left_out[:_LIMIT]
        for key, reason in shown:
            console.print(f"  {key}: {reason}", markup=False, soft_wrap=True)
        if len(shown) < len(left_out):
            console.print(f"  … and {len(left_out) - len(shown):,} more (--images lists all)")
    if images:
        _image_table(console, dataset)


def _subset_lines(console: Console, dataset: DatasetOverview) -> None:
    for subset in dataset.read.config.subsets:
        mine = dataset.read.images.subset == subset.number
        times = _times(np.unique(dataset.read.images.repeats[mine]).tolist())
        source = subset.image_dir if subset.metadata_file is None else subset.metadata_file
        regular = ", regularization" if subset.is_reg else ""
        count = int(np.count_nonzero(mine))
        text = f"  {source}: {counted(count, 'image')}{times}{regular}"
        console.print(text, markup=False, soft_wrap=True)


_COLUMNS = ("bucket", "aspect", "images", "samples", "batches", "short", "cut off", "worst", "enlarged")


def _bucket_table(console: Console, dataset: DatasetOverview) -> None:
    placed = dataset.images
    loss = placed.crop_losses()
    if not len(loss):
        console.print("no image is trained")
        return
    rows = placed.rows()
    enlarged = dataset.enlarged_per_bucket()
    cells = [
        (
            str(row.bucket), f"{row.bucket.aspect_ratio:.3f}", f"{row.images:,}", f"{row.samples:,}",
            f"{row.batches:,}", str(row.short_batches or ""), f"{row.mean_crop_loss:.1%}", f"{row.worst_crop_loss:.1%}",
            _enlarged(up.images, up.most),
        )
        for row, up in zip(rows, enlarged, strict=True)
    ]  # fmt: skip
    short = sum(row.short_batches for row in rows)
    total = (
        f"{len(placed.buckets)} buckets", "", f"{len(placed.keys):,}", f"{int(placed.samples_per_bucket.sum()):,}",
        f"{placed.batches:,}", str(short or ""), f"{loss.mean():.1%}", f"{loss.max():.1%}",
        _enlarged(sum(up.images for up in enlarged), max(up.most for up in enlarged)),
    )  # fmt: skip
    print_fitting(console, partial(bucket_table, _COLUMNS, cells, total), ("aspect", "short", "samples", "batches"))


def bucket_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str], without: Collection[str]
) -> Table:
    """A row for each bucket and one for all, without some of the columns."""
    kept = [k for k, name in enumerate(columns) if name not in without]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k in kept:
        table.add_column(columns[k], justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[k] for k in kept))
    table.add_section()
    table.add_row(*(total[k] for k in kept))
    return table


def _enlarged(images: int, most: float) -> str:
    return f"{images:,} (up to {most:.3g}x)" if images else ""


def _times(repeats: list[int]) -> str:
    if not repeats:
        return ""
    if repeats[0] != repeats[-1]:
        return f", {repeats[0]} to {repeats[-1]} times each"
    return ", once each" if repeats[0] == 1 else f", {repeats[0]} times each"


def _image_table(console: Console, dataset: DatasetOverview) -> None:
    console.print(f"{'size':>11} {'bucket':>10} {'resized':>11} {'cut left,top,right,bottom':>26} {'crop':>6}  image")
    for row in dataset.image_rows():
        cut = ",".join(map(str, row.cut))
        console.print(
            f"{_size(row.size):>11} {_size(row.bucket):>10} {_size(row.resized):>11} {cut:>26} "
            f"{row.crop_loss:>6.1%}  {row.key}",
            markup=False,
            soft_wrap=True,
        )


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def gpu_table(console: Console, rows: tuple[GpuRow, ...], accumulate: int, trainer: str) -> None:
    """The epoch on each number of GPUs, beside what the trainer would do alone."""
    console.print()
    console.print("[bold]An epoch[/bold]" + (f", {accumulate} batches per update" if accumulate > 1 else ""))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["GPUs", "steps", "samples", "missed", "repeated", "idle", f"idle in {trainer} alone"]
    for name in names[:2] + (["updates"] if accumulate > 1 else []) + names[2:]:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row.gpus}", f"{row.steps:,}", *([f"{row.updates:,}"] if accumulate > 1 else [])]
        cells += [f"{row.samples:,}", f"{row.missed:,}", f"{row.repeated:,}", f"{row.idle:.1%}"]
        table.add_row(*cells, f"{row.idle_independent:.1%}")
    print_table(console, table)
    for row in rows:
        if row.missed or row.repeated or row.moved:
            console.print(f"{row.gpus} GPUs: {row.ledger}", soft_wrap=True)
        if row.left_over:
            console.print(f"{row.gpus} GPUs: {row.left_over}", markup=False, soft_wrap=True)


def lost_table(console: Console, rows: Sequence[GpuRow], model: str | None) -> None:
    """What each way of giving GPUs their batches loses, where there are several GPUs and it is known."""
    known = [(row.gpus, row.lost) for row in rows if row.gpus > 1 and row.lost is not None]
    if not known:
        return
    console.print()
    console.print(f"[bold]Time lost to waiting and repeats[/bold], by the {f'cost of {model}' if model else 'pixels'}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("GPUs", "shuffled", "one shape", "equal cost"):
        table.add_column(name, justify="right")
    for gpus, lost in known:
        table.add_row(f"{gpus}", *(f"{share:.1%}" for share in lost))
    print_table(console, table)
