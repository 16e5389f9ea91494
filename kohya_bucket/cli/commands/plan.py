"""`kohya-bucket plan CONFIG`: what will be trained, before it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kohya_bucket.buckets.families import family_named
from kohya_bucket.cli.configs import asked_trainer, only_one
from kohya_bucket.cli.console import say
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import AsJson, RuleArguments, TrainerArguments, gpu_counts


def plan(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="a dataset config, a job, a file for --config_file, a GUI preset, or a folder of images"),
    ] = None,
    config_option: Path | None = opt(None, "", "--config", "-c", usual=False),
    gpus: str | None = opt(None),
    accumulate: int | None = opt(
        None, "batches for one update of the weights; by default as the file says, or 1", min=1
    ),
    images: bool = opt(False, "list every image with its bucket and crop", "--images"),
    as_json: AsJson = False,
    strict: bool = opt(False, "exit code 1 for warnings and images left out", "--strict"),
    train_data_dir: str | None = opt(None, "folder of `5_name` folders, without a config"),
    reg_data_dir: str | None = opt(None, "the same for regularization images", usual=False),
    in_json: str | None = opt(None, "fine-tuning metadata, with --train-data-dir", usual=False),
    arch: str | None = opt(None),
    sd_scripts: str | None = opt(None),
    *,
    arguments: TrainerArguments,
) -> None:
    """A mistake in CONFIG does not keep its plan from being shown: what stops the trainer stands below it.
    Exit code 0: it trains; 1: something would stop the training (with --strict: or spoil it); 2: unusable input.
    """
    from kohya_bucket.cli.plan_view import show
    from kohya_bucket.cli.subjects import Terminal
    from kohya_bucket.trainers.door.face import Asked
    from kohya_bucket.trainers.door.findings import Severity

    config, counts = only_one(config, config_option), None if gpus is None else gpu_counts(gpus)
    folders = {"train_data_dir": train_data_dir, "reg_data_dir": reg_data_dir, "in_json": in_json}
    trainer = asked_trainer("plan", context, config, (*vars(arguments), *folders, "sd_scripts"))
    asked = Asked(config, arch, sd_scripts, arguments.given() | folders)
    usual: dict[str, Any] = {}
    of_folder = config is not None and config.is_dir()
    if of_folder or (config is None and arch is not None):
        title = trainer.programs(asked).title  # an unknown one is said
        usual = _usual(context, arch or "sd", replace(arguments, enable_bucket=arguments.enable_bucket or of_folder))
    if of_folder:
        usual["enable_bucket"] = True
        if not as_json:
            say(_measured_for(title or family_named("sd").title, {**arguments.given(), **usual}))
    planned = trainer.plan(
        replace(asked, arguments={**asked.arguments, **usual}), counts, accumulate, images, Terminal()
    )
    show(planned, images, as_json)
    spoiled = planned.left_out or bool(planned.findings.of(Severity.WARNING))
    stops = bool(planned.findings.of(Severity.ERROR))
    hint = planned.hint
    if usual and not of_folder:
        said = " ".join(f"--{name} {value}" for name, value in usual.items())
        hint = f"as is usual for {arch}; for the trainer: {said}"
    if hint and not as_json and not stops:
        say(hint)
    raise typer.Exit(1 if stops or planned.unplanned or (strict and spoiled) else 0)


def _measured_for(model: str, keys: Mapping[str, Any]) -> str:
    """For what a folder is planned, and how to name something else."""
    others = "others: --arch sdxl, --resolution 1024, --batch-size 4, or a config"
    return f"Planned for {model} at {keys['resolution']}, batch size {keys['train_batch_size'] or 1}; {others}"


def _usual(context: typer.Context, arch: str, arguments: TrainerArguments) -> dict[str, Any]:
    """What people set for the family, of the arguments that are not given."""
    usual = RuleArguments().for_arch(context, arch)
    sides = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps") if arguments.enable_bucket else ()
    return {name: getattr(usual, name) for name in ("resolution", *sides) if getattr(arguments, name) is None}
