"""`kohya-bucket plan CONFIG`: what will be trained, before it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kohya_bucket.cli.configs import adapter_options
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.cli.gpus import gpu_counts
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.release import release_at_hand
from kohya_bucket.errors import KohyaBucketError

_SILENT = "where the config is silent"


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="dataset config of sd-scripts (TOML or JSON)")] = None,
    gpus: Annotated[str, typer.Option(help="numbers of GPUs to plan for, e.g. 1,2,4,8")] = "1",
    accumulate: Annotated[int, typer.Option(min=1, help="batches for one update of the weights")] = 1,
    images: Annotated[bool, typer.Option("--images", help="list every image with its bucket and crop")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit code 1 for warnings and images left out")] = False,
    train_data_dir: Annotated[str | None, typer.Option(help="folder of `5_name` folders, without a config")] = None,
    reg_data_dir: Annotated[str | None, typer.Option(help="the same for regularization images")] = None,
    in_json: Annotated[str | None, typer.Option(help="fine-tuning metadata, with --train-data-dir")] = None,
    resolution: Annotated[str | None, typer.Option(help="512 or 512,768, where the config is silent")] = None,
    train_batch_size: Annotated[
        int | None, typer.Option("--train-batch-size", "--batch-size", min=1, help=_SILENT)
    ] = None,
    enable_bucket: Annotated[bool, typer.Option("--enable-bucket", help=_SILENT)] = False,
    bucket_no_upscale: Annotated[bool, typer.Option("--bucket-no-upscale", help=_SILENT)] = False,
    min_bucket_reso: Annotated[int | None, typer.Option(help=_SILENT)] = None,
    max_bucket_reso: Annotated[int | None, typer.Option(help=_SILENT)] = None,
    bucket_reso_steps: Annotated[int | None, typer.Option(help=_SILENT)] = None,
    skip_image_resolution: Annotated[str | None, typer.Option(help=_SILENT)] = None,
    caption_extension: Annotated[str | None, typer.Option(help=_SILENT)] = None,
    sd_scripts: Annotated[str | None, typer.Option(help="its checkout or version; by default the one at hand")] = None,
) -> None:
    """Exit code 0: it trains; 1: something would stop the training (with --strict: or spoil it); 2: unusable input."""
    from kohya_bucket.cli.plan_tables import show_findings, show_plan
    from kohya_bucket.sdscripts.config import Severity, read_config, read_folders
    from kohya_bucket.sdscripts.plan.overview import overview

    given = {
        "resolution": resolution, "train_batch_size": train_batch_size, "enable_bucket": enable_bucket or None,
        "bucket_no_upscale": bucket_no_upscale or None, "min_bucket_reso": min_bucket_reso,
        "max_bucket_reso": max_bucket_reso, "bucket_reso_steps": bucket_reso_steps,
        "skip_image_resolution": skip_image_resolution, "caption_extension": caption_extension,
    }  # fmt: skip
    release = release_at_hand(sd_scripts)
    if config is not None and train_data_dir is None:
        refuse_beside(context, f"{config} brings its own images", ("reg_data_dir", "in_json"))
        read = read_config(config, given, release=release)
    elif train_data_dir is not None and config is None:
        read = read_folders(train_data_dir, reg_data_dir, given, in_json=in_json, release=release)
    else:
        raise KohyaBucketError("name a dataset config, or --train-data-dir, one of the two")
    if read.findings.of(Severity.ERROR):
        show_findings(read, images, as_json)
        raise typer.Exit(1)
    with scan_progress("reading image headers") as progress:
        seen = overview(read, adapter_options(read), gpu_counts(gpus), accumulate, progress)
    show_plan(read, seen, images, accumulate, as_json)
    warned = read.findings.of(Severity.WARNING) or any(dataset.left_out for dataset in seen.datasets)
    raise typer.Exit(1 if read.findings.of(Severity.ERROR) or (strict and warned) else 0)
