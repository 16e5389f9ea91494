"""`kohya-bucket plan CONFIG`: what will be trained, before it is."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from kohya_bucket.cli.configs import Arch, only_one
from kohya_bucket.cli.console import say, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import AsJson, RuleArguments, TrainerArguments, gpu_counts, refuse_beside
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import argument
from kohya_bucket.reports.trainers import AI_TOOLKIT, SD_SCRIPTS, release_at_hand, trainer_at_hand, trainer_of


def plan(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(
            help="dataset config of sd-scripts or musubi-tuner, job of ai-toolkit, file for --config_file, or "
            "preset of the GUI"
        ),
    ] = None,
    config_option: Path | None = opt(None, "the same as CONFIG", "--config", "-c", usual=False),
    gpus: str | None = opt(None, "numbers of GPUs to plan for, e.g. 1,2,4,8; by default as the file says, or 1"),
    accumulate: int | None = opt(
        None, "batches for one update of the weights; by default as the file says, or 1", min=1
    ),
    images: bool = opt(False, "list every image with its bucket and crop", "--images"),
    as_json: AsJson = False,
    strict: bool = opt(False, "exit code 1 for warnings and images left out", "--strict"),
    train_data_dir: str | None = opt(None, "folder of `5_name` folders, without a config"),
    reg_data_dir: str | None = opt(None, "the same for regularization images", usual=False),
    in_json: str | None = opt(None, "fine-tuning metadata, with --train-data-dir", usual=False),
    arch: Arch = None,
    sd_scripts: str | None = opt(None, "its checkout or version; by default the checkout that you are in"),
    *,
    arguments: TrainerArguments,
) -> None:
    """A mistake in CONFIG does not keep its plan from being shown: what stops the trainer stands below it.
    Exit code 0: it trains; 1: something would stop the training (with --strict: or spoil it); 2: unusable input.
    """
    from kohya_bucket.cli.plan_view import show
    from kohya_bucket.reports.config_plan import plan_job, plan_musubi, plan_sdscripts
    from kohya_bucket.trainers.door.findings import Severity
    from kohya_bucket.trainers.sdscripts.config import read_config, read_folders

    config, counts, hint = only_one(config, config_option), None if gpus is None else gpu_counts(gpus), ""
    whose = trainer_of(config)
    if config is not None and whose != SD_SCRIPTS:
        own = (*(field.name for field in fields(arguments)), "train_data_dir", "reg_data_dir", "in_json", "sd_scripts")
        own += ("arch",) * (whose == AI_TOOLKIT)
        refuse_beside(context, f"{config} is a config of {whose}, which says all of that itself", own)
        with scan_progress("reading images and clips") as progress:
            if whose == AI_TOOLKIT:
                found = plan_job(config, counts or [1], accumulate, images, progress)
            else:
                found = plan_musubi(config, arch, counts or [1], accumulate or 1, images, progress)
        left_out = False
    else:
        release, checkout = release_at_hand(sd_scripts)
        trainer = trainer_at_hand(arch, checkout, config)
        if config is None:
            arguments, hint = _usual(context, arch, arguments)
        given = arguments.given()
        if config is not None:
            given |= {"train_data_dir": train_data_dir, "reg_data_dir": reg_data_dir, "in_json": in_json}
            read = read_config(config, given, release=release, trainer=trainer)
            if read.length is None:
                hint = f"give it to the trainer as --dataset_config {argument(config)}, not as --config_file"
        elif train_data_dir is not None:
            read = read_folders(train_data_dir, reg_data_dir, given, in_json=in_json, release=release, trainer=trainer)
        else:
            raise KohyaBucketError("name a dataset config, a file for --config_file, a GUI preset, or --train-data-dir")
        with scan_progress("reading image headers") as progress:
            found, left_out = plan_sdscripts(read, counts, accumulate, images, progress)
    show(found, images, as_json)
    spoiled, stops = left_out or bool(found.findings.of(Severity.WARNING)), bool(found.findings.of(Severity.ERROR))
    if hint and not as_json and not stops:
        say(hint)
    raise typer.Exit(1 if stops or (strict and spoiled) else 0)


def _usual(context: typer.Context, arch: str | None, arguments: TrainerArguments) -> tuple[TrainerArguments, str]:
    """With what people set for the family in place of what is not given, and what the trainer then needs, as a line."""
    if arch is None:
        return arguments, ""
    usual = RuleArguments().for_arch(context, arch)
    sides = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps") if arguments.enable_bucket else ()
    added = {name: getattr(usual, name) for name in ("resolution", *sides) if getattr(arguments, name) is None}
    hint = f"as is usual for {arch}; for the trainer: {' '.join(f'--{name} {value}' for name, value in added.items())}"
    return replace(arguments, **added), hint if added else ""
