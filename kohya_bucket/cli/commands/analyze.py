"""`kohya-bucket analyze`: what a dataset becomes, in the terminal, as JSON, or as a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.configs import given_config
from kohya_bucket.cli.console import plain_console, say, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import (
    BATCH_SIZE,
    AsJson,
    Quiet,
    Recursive,
    RuleArguments,
    check_output,
    engine_of,
    refuse_beside,
    refuse_one_file,
)
from kohya_bucket.files import MADE_BY, replace_file
from kohya_bucket.texts import counted, is_whole

if TYPE_CHECKING:
    from kohya_bucket.cli.subjects import Reading
    from kohya_bucket.reports.analysis import Analysis
    from kohya_bucket.trainers.door.findings import Finding
    from kohya_bucket.trainers.door.subject import Subject

_IN_TERMINAL, _IN_JSON, _ON_PAGE = 5, 100, 300  # images in each list
_PICTURES = 240  # small ones on a page


def analyze(
    context: typer.Context,
    path: Annotated[
        list[str] | None, typer.Argument(help="Folders, files, patterns, lists, tar shards, or one table of sizes.")
    ] = None,
    config: Path | None = opt(None),
    batch_size: int | None = opt(None, "", *BATCH_SIZE, min=1),
    arch: str | None = opt(None),
    *,
    decode: bool = opt(False, "Decode every image, to find damaged pixels.", "--decode"),
    hash: bool = opt(False, "", "--hash"),
    html: Path | None = opt(None, "Write the report to this file, too.", "--html"),
    list_bad: Path | None = opt(None, "Write the paths of images to repair, split or leave out into this file."),
    as_json: AsJson = False,
    options: RuleArguments,
    cache: Path | None = opt(
        None, "A file of `cache sizes`. Unchanged images are not opened, and the file is updated.", usual=False
    ),
    recursive: Recursive = True,
    workers: int | None = opt(None, usual=False, min=1),
    engine: str = opt("local", usual=False),
    quiet: Quiet = False,
) -> None:
    quiet = quiet or as_json
    config, options, path = given_config(config, options, path or [])
    refuse_one_file({"--html": html, "--cache": cache, "--list-bad": list_bad})
    check_output("--html", html, "a web page", [*path, config, options.bucket_config, cache])
    check_output("--cache", cache, "a Parquet file", [], lambda _: True)  # it is read before it is written
    check_output("--list-bad", list_bad, "a list of paths", [*path, config, options.bucket_config, cache])
    from kohya_bucket.cli.subjects import Reading
    from kohya_bucket.reports.analysis import analyze as look_at
    from kohya_bucket.trainers.door.captions import CODES

    reading = Reading(recursive, hash, cache, workers, quiet, engine_of(engine), decode)
    subjects, findings = _subjects(context, path, config, options, batch_size, arch, reading)
    of_captions = [finding for finding in findings if subjects and finding.code in CODES]
    subjects[:1] = [replace(subject, findings=of_captions) for subject in subjects[:1]]
    unused = [name for name, value in {"--hash": hash, "--cache": cache}.items() if value]
    if unused and any(subject.clips is not None for subject in subjects):
        say(f"{' and '.join(unused)}: for images alone; clips are not compared, and are read again each time", err=True)
    analyses = [look_at(subject) for subject in subjects]
    if html is not None:
        analyses = _write_page(analyses, html, "" if config is None else config.name, quiet)
    if list_bad is not None:
        _write_list(analyses, list_bad)
    from kohya_bucket.cli.analysis_view import measured_for, print_analysis
    from kohya_bucket.reports.output import report_as_dict

    if as_json:
        report = report_as_dict(analyses, _IN_JSON, [f.as_dict() for f in findings])
        sys.stdout.write(json.dumps(report, indent=1, allow_nan=False) + "\n")
        return
    console = plain_console()
    if config is None and analyses:
        console.print(measured_for(analyses[0]), soft_wrap=True)
    for finding in findings:
        if finding not in of_captions:
            console.print(f"{finding.severity.value}: ", style="yellow", end="")
            console.print(finding.text, soft_wrap=True)
    for analysis in analyses:
        print_analysis(analysis, console, _IN_TERMINAL, decoded=decode)


def _subjects(
    context: typer.Context, path: list[str], config: Path | None, options: RuleArguments, batch_size: int | None,
    arch: str | None, reading: Reading,
) -> tuple[list[Subject], list[Finding]]:  # fmt: skip
    from kohya_bucket.cli.subjects import from_folders
    from kohya_bucket.trainers.door.face import Asked
    from kohya_bucket.trainers.door.registry import trainer_for, usual_trainer

    if config is not None:
        what = f"--config {config} brings its own images and rules"
        refuse_beside(context, what, (*options.fields, "recursive"), path)
        return trainer_for("analyze", config).subjects(Asked(config, arch), batch_size, reading)
    programs = usual_trainer().programs(Asked(arch=arch))
    return from_folders(path, options.for_arch(context, programs.family), batch_size or 1, reading, programs)


def _write_page(analyses: Sequence[Analysis], html: Path, title: str, quiet: bool) -> list[Analysis]:
    """Write the report; the analyses, in which images that its small pictures prove to be broken are so, too."""
    from kohya_bucket.reports.page import render_page
    from kohya_bucket.reports.pictures import illustrate

    with scan_progress("making thumbnails", quiet=quiet) as progress:
        analyses, pictures = illustrate(analyses, _PICTURES, progress)
    page = render_page(analyses, title=title, thumbnails=_PICTURES, limit=_ON_PAGE, pictures=pictures)
    replace_file(html, page.encode("utf-8"))
    say(f"{html}: {len(page) / 1e6:.1f} MB, opens in any browser", err=True)
    return analyses


def _write_list(analyses: Sequence[Analysis], target: Path) -> None:
    """A comment and one path per line, as lists of paths are read; some names cannot be in one."""
    from kohya_bucket.reports.recommend import bad_files

    bad = list(dict.fromkeys(name for analysis in analyses for name in bad_files(analysis)))
    listed = [name for name in bad if is_whole(name) and {"\n", "\r"}.isdisjoint(name)]
    replace_file(target, "".join(f"{line}\n" for line in (f"# {MADE_BY}", *listed)).encode("utf-8"))
    left, unlisted = len(bad) - len(listed), ""
    if left:
        names, them = counted(left, "name", "has", "have"), "it" if left == 1 else "them"
        unlisted = f"; {names} a line break or bytes that are no text, so the list leaves {them} out"
    say(f"{counted(len(listed), 'path')} of images to repair, split or leave out in {target}{unlisted}", err=True)
