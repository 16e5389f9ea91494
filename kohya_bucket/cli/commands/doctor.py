"""`kohya-bucket doctor [CONFIG]`: what keeps a training from starting or would end it, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.configs import asked_trainer, only_one
from kohya_bucket.cli.console import STYLES, plain_console, say, say_first
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import AsJson, TrainerArguments
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from rich.console import Console

    from kohya_bucket.trainers.door.file_findings import Section


def doctor(
    context: typer.Context,
    config: Annotated[Path | None, typer.Argument(help="as for `plan`")] = None,
    config_option: Path | None = opt(None, "", "--config", "-c", usual=False),
    sd_scripts: str | None = opt(None),
    arch: str | None = opt(None),
    quick: bool = opt(False, "decode no image and import no sd-scripts", "--quick"),
    as_json: AsJson = False,
    *,
    arguments: TrainerArguments,
) -> None:
    """Nothing on disk is changed.
    Exit code 0: nothing was found that stops a training; 1: something was, with kohya_bucket or without; 2: unusable
    input.
    """
    from kohya_bucket.cli.subjects import Terminal
    from kohya_bucket.trainers.door.face import Asked

    config = only_one(config, config_option)
    trainer = asked_trainer("doctor", context, config, ("sd_scripts", *vars(arguments)))
    sections = sorted(
        trainer.examine(Asked(config, arch, sd_scripts, arguments.given()), Terminal(), quick), key=_urgency
    )
    if as_json:
        typer.echo(json.dumps({"sections": [section.as_dict() for section in sections]}, indent=2))
    else:
        say(_verdict(sections))
        for section in sections:
            _print(plain_console(), section)
    raise typer.Exit(1 if any(section.stops for section in sections) else 0)


def _urgency(section: Section) -> int:
    """What stops the training comes first, then what harms it; others stay in their order."""
    from kohya_bucket.trainers.door.findings import HARMS

    return min((HARMS.index(finding.harm) for finding in section.findings), default=len(HARMS))


def _print(console: Console, section: Section) -> None:
    console.print()
    console.print(section.title, style="bold", soft_wrap=True)
    for finding in section.findings:
        console.print(f"  {finding.severity.value}: ", style=STYLES[finding.severity.value], end="")
        where = f"{finding.where}: " if finding.where else ""
        console.print(where + finding.message, soft_wrap=True)
        if finding.remedy:
            console.print(f"    what to do: {finding.remedy}", soft_wrap=True)
        if any(name not in finding.message for name in finding.names):
            say_first(finding.names, rest=" (--json names all)", indent="    ")
    width = max((len(name) for name, _ in section.facts), default=0)
    for name, text in section.facts:
        console.print(f"  {name:<{width}}  {text}", soft_wrap=True)


def _verdict(sections: Sequence[Section]) -> str:
    from kohya_bucket.trainers.door.findings import Severity

    findings = [finding for section in sections for finding in section.findings]
    errors, warnings = (sum(f.severity is s for f in findings) for s in (Severity.ERROR, Severity.WARNING))
    alone = sum(f.stops_alone for f in findings)
    warnings -= alone
    if not errors and not warnings and not alone:
        return "nothing found that would stop the training or harm it"
    stops = counted(errors, "problem") if errors else "nothing"
    without = f", {alone:,} that would stop sd-scripts without kohya_bucket" if alone else ""
    return f"{stops} found that would stop the training{without}, {counted(warnings, 'problem')} that would harm it"
