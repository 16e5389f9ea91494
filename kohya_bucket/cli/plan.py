"""`kohya-bucket plan CONFIG`: what will be trained, before it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kohya_bucket.cli.console import print_table, wide_console
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.cli.gpus import gpu_counts
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.release import release_at_hand
from kohya_bucket.errors import KohyaBucketError

if TYPE_CHECKING:
    from kohya_bucket.adapter.options import AdapterOptions
    from kohya_bucket.sdscripts.config import Config, Findings
    from kohya_bucket.sdscripts.plan.overview import DatasetOverview, GpuRow, Overview

_LIMIT = 20
_SILENT = "where the config is silent"


def register(app: typer.Typer) -> None:
    @app.command()
    def plan(
        context: typer.Context,
        config: Annotated[Path | None, typer.Argument(help="dataset config of sd-scripts (TOML or JSON)")] = None,
        gpus: Annotated[str, typer.Option(help="numbers of GPUs to plan for, e.g. 1,2,4,8")] = "1",
        accumulate: Annotated[int, typer.Option(min=1, help="batches for one update of the weights")] = 1,
        images: Annotated[bool, typer.Option("--images", help="list every image with its bucket and crop")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
        strict: Annotated[bool, typer.Option("--strict", help="exit code 1 for warnings and images left out")] = False,
        train_data_dir: Annotated[
            str | None, typer.Option("--train-data-dir", help="folder of `5_name` folders, without a config")
        ] = None,
        reg_data_dir: Annotated[
            str | None, typer.Option("--reg-data-dir", help="the same for regularization images")
        ] = None,
        in_json: Annotated[
            str | None, typer.Option("--in-json", help="fine-tuning metadata, with --train-data-dir")
        ] = None,
        resolution: Annotated[str | None, typer.Option(help="512 or 512,768, where the config is silent")] = None,
        train_batch_size: Annotated[
            int | None, typer.Option("--train-batch-size", "--batch-size", min=1, help=_SILENT)
        ] = None,
        enable_bucket: Annotated[bool, typer.Option("--enable-bucket", help=_SILENT)] = False,
        bucket_no_upscale: Annotated[bool, typer.Option("--bucket-no-upscale", help=_SILENT)] = False,
        min_bucket_reso: Annotated[int | None, typer.Option("--min-bucket-reso", help=_SILENT)] = None,
        max_bucket_reso: Annotated[int | None, typer.Option("--max-bucket-reso", help=_SILENT)] = None,
        bucket_reso_steps: Annotated[int | None, typer.Option("--bucket-reso-steps", help=_SILENT)] = None,
        skip_image_resolution: Annotated[str | None, typer.Option("--skip-image-resolution", help=_SILENT)] = None,
        caption_extension: Annotated[str | None, typer.Option("--caption-extension", help=_SILENT)] = None,
        sd_scripts: Annotated[
            str | None, typer.Option("--sd-scripts", help="its checkout or version; by default the one at hand")
        ] = None,
    ) -> None:
        """Show what a dataset config trains: buckets, batches, crops, what is left out, steps per epoch.

        Exit code 0: it trains; 1: something would stop the training (with --strict: or spoil it); 2: unusable input.
        """
        from kohya_bucket.adapter.options import AdapterOptions, environment_table
        from kohya_bucket.sdscripts.config import Severity, read_config, read_folders
        from kohya_bucket.sdscripts.plan.overview import overview

        given = {
            "resolution": resolution,
            "train_batch_size": train_batch_size,
            "enable_bucket": enable_bucket or None,
            "bucket_no_upscale": bucket_no_upscale or None,
            "min_bucket_reso": min_bucket_reso,
            "max_bucket_reso": max_bucket_reso,
            "bucket_reso_steps": bucket_reso_steps,
            "skip_image_resolution": skip_image_resolution,
            "caption_extension": caption_extension,
        }
        given = {key: value for key, value in given.items() if value is not None}
        if (config is None) == (train_data_dir is None):
            raise KohyaBucketError("name a dataset config, or --train-data-dir, one of the two")
        release = release_at_hand(sd_scripts)
        if config is not None:
            refuse_beside(context, f"{config} brings its own images", ("reg_data_dir", "in_json"))
            read = read_config(config, given, release=release)
        else:
            read = read_folders(str(train_data_dir), reg_data_dir, given, in_json=in_json, release=release)
        broken = any(f.severity is Severity.ERROR for f in read.findings)
        tables = environment_table() + ([(str(config), read.table)] if read.table is not None else [])
        settings = AdapterOptions() if broken else AdapterOptions.from_tables(*tables)
        if broken:
            _print_findings(read, as_json, images)
            raise typer.Exit(1)
        with scan_progress("reading image headers") as progress:
            seen = overview(read, settings, gpu_counts(gpus), accumulate, progress)
        if as_json:
            typer.echo(json.dumps(_as_json(read, seen, images), indent=2))
        else:
            _print(read, seen, images, accumulate)
        warned = any(f.severity is Severity.WARNING for f in read.findings) or any(d.left_out for d in seen.datasets)
        stops = any(f.severity is Severity.ERROR for f in read.findings)
        raise typer.Exit(1 if stops or (strict and warned) else 0)


def _print_findings(read: Config, as_json: bool, images: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"findings": [f.as_dict() for f in read.findings]}, indent=2))
        return
    _findings_table(wide_console(), read.findings, images)


def _findings_table(console: Console, findings: Findings, names: bool) -> None:
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for finding in findings:
        console.print(f"{finding.severity.value}: ", style=styles[finding.severity.value], end="")
        console.print(finding.text, markup=False, soft_wrap=True)
        # The text names the first few.
        for name in finding.names if names and len(finding.names) > 3 else ():
            console.print(f"    {name}", markup=False, soft_wrap=True)


def _print(read: Config, seen: Overview, images: bool, accumulate: int) -> None:
    console = wide_console()
    for number, dataset in enumerate(seen.datasets, 1):
        _print_dataset(console, number, dataset, seen.settings, images)
    if seen.gpus:
        _gpu_table(console, seen.gpus, accumulate)
    if len(read.findings):
        console.print()
        _findings_table(console, read.findings, images)


def _resolutions(settings: AdapterOptions) -> str:
    weights = settings.resolution_weights or ("",) * len(settings.resolutions or ())
    sizes = [
        f"{w}x{h}" + (f" ({n})" if n else "") for (w, h), n in zip(settings.resolutions or (), weights, strict=True)
    ]
    ways = {"all": "each image at each", "rotate": "one per epoch in turn", "weighted": "one per epoch by weight"}
    return f"{', '.join(sizes)} ({ways[settings.resolution_mode]})"


def _print_dataset(
    console: Console, number: int, dataset: DatasetOverview, settings: AdapterOptions, images: bool
) -> None:
    config, placed = dataset.read.config, dataset.images
    width, height = config.resolution or (0, 0)
    mode = "one size" if not config.enable_bucket else "no upscaling" if config.bucket_no_upscale else "buckets"
    kind = config.kind.name.lower().replace("_", "-")
    resolution = f"{width}x{height}" if settings.resolutions is None else _resolutions(settings)
    console.print(f"\n[bold]Dataset {number}[/bold]: {kind}, {resolution}, {mode}, batch size {config.batch_size}")
    for subset in config.subsets:
        mine = dataset.read.images.subset == subset.number
        repeats = np.unique(dataset.read.images.repeats[mine]).tolist()
        times = _times(repeats)
        source = subset.image_dir if subset.metadata_file is None else subset.metadata_file
        regular = ", regularization" if subset.is_reg else ""
        count = int(np.count_nonzero(mine))
        text = f"  {source}: {count:,} image{'s' * (count != 1)}{times}{regular}"
        console.print(text, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("bucket", "aspect", "images", "samples", "batches", "short", "cut off", "worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in placed.rows():
        table.add_row(
            str(row.bucket), f"{row.bucket.aspect_ratio:.3f}", f"{row.images:,}", f"{row.samples:,}",
            f"{row.batches:,}", str(row.short_batches or ""), f"{row.mean_crop_loss:.1%}", f"{row.worst_crop_loss:.1%}",
        )  # fmt: skip
    table.add_section()
    loss = placed.crop_losses()
    if len(loss):
        short = sum(row.short_batches for row in placed.rows())
        table.add_row(
            f"{len(placed.buckets)} buckets", "", f"{len(placed.keys):,}",
            f"{int(placed.samples_per_bucket.sum()):,}",
            f"{placed.batches:,}", str(short or ""), f"{loss.mean():.1%}", f"{loss.max():.1%}",
        )  # fmt: skip
        print_table(console, table)
    else:
        console.print("no image is trained")
    if dataset.read.validation is not None:
        console.print(f"held back for validation: {len(dataset.read.validation):,}")
    if dataset.rotated:
        console.print(f"with an EXIF rotation, which sd-scripts does not obey: {dataset.rotated:,}")
    not_trained = _not_trained(dataset)
    if not_trained:
        console.print(f"[yellow]not trained: {len(not_trained):,}[/yellow]")
        shown = not_trained if images else not_trained[:_LIMIT]
        for key, reason in shown:
            console.print(f"  {key}: {reason}", markup=False, soft_wrap=True)
        if len(shown) < len(not_trained):
            console.print(f"  … and {len(not_trained) - len(shown):,} more (--images lists all)")
    if images:
        _image_table(console, dataset)


def _not_trained(dataset: DatasetOverview) -> tuple[tuple[str, str], ...]:
    """Images that no bucket takes, and those that `skip_image_resolution` leaves out."""
    return dataset.left_out + dataset.read.images.skipped


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


def _gpu_table(console: Console, rows: tuple[GpuRow, ...], accumulate: int) -> None:
    console.print("\n[bold]An epoch[/bold]" + (f", {accumulate} batches per update" if accumulate > 1 else ""))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["GPUs", "steps", "samples", "missed", "repeated", "idle", "idle in sd-scripts alone"]
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


def _as_json(read: Config, seen: Overview, images: bool) -> dict[str, Any]:
    from dataclasses import asdict

    datasets = []
    for dataset in seen.datasets:
        config = dataset.read.config
        entry: dict[str, Any] = {
            "kind": config.kind.name.lower(),
            "resolution": config.resolution,
            "batch_size": config.batch_size,
            "enable_bucket": config.enable_bucket,
            "bucket_no_upscale": config.bucket_no_upscale,
            "images": len(dataset.images.keys),
            "samples": int(dataset.images.samples_per_bucket.sum()),
            "batches": dataset.images.batches,
            "validation_images": len(dataset.read.validation) if dataset.read.validation is not None else 0,
            "rotated_by_exif": dataset.rotated,
            "buckets": [
                {**asdict(row), "bucket": row.bucket.as_tuple(), "aspect": row.bucket.aspect_ratio}
                for row in dataset.images.rows()
            ],
            "not_trained": [{"image": key, "reason": reason} for key, reason in _not_trained(dataset)],
        }
        if images:
            entry["image_rows"] = [asdict(row) for row in dataset.image_rows()]
        datasets.append(entry)
    return {
        "config": str(read.path) if read.path else None,
        "settings": asdict(seen.settings),
        "datasets": datasets,
        "gpus": [asdict(row) for row in seen.gpus],
        "findings": [f.as_dict() for f in read.findings],
    }
