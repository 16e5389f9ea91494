"""`kohya-bucket analyze`: what a data set becomes, in the terminal, as JSON, or as one HTML file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kohya_bucket.cli.console import plain_console
from kohya_bucket.cli.engines import ENGINE_HELP, engine_of
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.cli.subjects import Reading, RuleOptions, from_config, from_folders, is_bucket_set
from kohya_bucket.errors import ConfigError, KohyaBucketError, why_not_written
from kohya_bucket.reports.analysis import analyze as look_at
from kohya_bucket.reports.as_json import report_as_dict
from kohya_bucket.reports.page import render_page
from kohya_bucket.reports.terminal import print_analysis
from kohya_bucket.sdscripts.config import Finding

_OF_THE_CONFIG = (
    "preset", "bucket_config", "rule", "resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps",
    "bucket_no_upscale", "switching", "no_upscale_fit", "max_crop", "num", "recursive",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    @app.command()
    def analyze(
        context: typer.Context,
        path: Annotated[
            list[str] | None, typer.Argument(help="Folders, files, patterns, or .txt lists of paths.")
        ] = None,
        config: Annotated[
            Path | None, typer.Option(help="An sd-scripts dataset config: its images, its rules.")
        ] = None,
        preset: Annotated[str | None, typer.Option("--preset", "-p", help="A bundled bucket set, e.g. sdxl.")] = None,
        bucket_config: Annotated[
            Path | None, typer.Option("--bucket-config", "-c", help="A bucket set in a TOML or JSON file.")
        ] = None,
        rule: Annotated[
            str | None, typer.Option(help="kohya, novelai, exact or auto; kohya if nothing is given.")
        ] = None,
        resolution: Annotated[str, typer.Option(help="As in sd-scripts: 1024 or 832,1216.")] = "1024",
        min_bucket_reso: Annotated[int, typer.Option(help="As in sd-scripts.")] = 256,
        max_bucket_reso: Annotated[
            int | None, typer.Option(min=1, help="As in sd-scripts; twice the resolution's longer side if not given.")
        ] = None,
        bucket_reso_steps: Annotated[int, typer.Option(help="As in sd-scripts.")] = 64,
        bucket_no_upscale: Annotated[
            bool, typer.Option("--bucket-no-upscale", "--no-upscale", help="As in sd-scripts.")
        ] = False,
        switching: Annotated[str | None, typer.Option(help="midpoint, geometric or area.")] = None,
        no_upscale_fit: Annotated[str, typer.Option(help="kohya or largest.")] = "kohya",
        max_crop: Annotated[float | None, typer.Option(help="Largest share of an image that may be cut off.")] = None,
        num: Annotated[int, typer.Option(min=1, help="Number of buckets for --rule auto.")] = 8,
        batch_size: Annotated[
            int | None, typer.Option("--batch-size", "-b", min=1, help="Images per step; 1, or the config's.")
        ] = None,
        recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
        hash: Annotated[bool, typer.Option("--hash", help="Hash every file's content, to find duplicates.")] = False,
        decode: Annotated[
            bool, typer.Option("--decode", help="Decode every image: some are broken behind a whole header.")
        ] = False,
        cache: Annotated[
            Path | None, typer.Option(help="A file of build-cache: spares opening unchanged images, and is updated.")
        ] = None,
        workers: Annotated[int | None, typer.Option(min=1, help="At most this many threads or processes.")] = None,
        engine: Annotated[str, typer.Option(help=ENGINE_HELP)] = "local",
        min_count: Annotated[int, typer.Option(help="Buckets with fewer images are counted as rare.")] = 10,
        outlier_threshold: Annotated[
            float, typer.Option(help="Images further than this in log aspect from their bucket are outliers.")
        ] = 0.25,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        html: Annotated[Path | None, typer.Option("--html", help="Write the report to this file.")] = None,
        thumbnails: Annotated[int, typer.Option(min=0, help="At most this many small pictures in the HTML.")] = 240,
        limit: Annotated[int | None, typer.Option(min=1, help="At most this many images in each list.")] = None,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    ) -> None:
        """Count, place and judge a data set before training: crops, buckets, outliers, broken files, advice."""
        quiet = quiet or as_json
        check_output("--html", html, "a web page", [*(path or []), config, bucket_config, cache])
        check_output("--cache", cache, "a Parquet file", [])
        if html is not None:
            _make_room(html)
        reading = Reading(recursive, hash, cache, workers, quiet, engine_of(engine), decode)
        if config is not None and is_bucket_set(config) and bucket_config is None:
            config, bucket_config = None, config
        findings: list[Finding] = []
        if config is not None:
            _refuse_both(context, config, path)
            subjects, findings = from_config(config, batch_size, reading)
        else:
            options = RuleOptions(
                _rule_name(rule, preset, bucket_config), resolution, min_bucket_reso, max_bucket_reso,
                bucket_reso_steps, bucket_no_upscale, switching, no_upscale_fit, max_crop, num,
            )  # fmt: skip
            subjects = from_folders(path or [], options, batch_size or 1, reading)
        analyses = [look_at(s, min_count=min_count, outlier_threshold=outlier_threshold) for s in subjects]
        if html is not None:
            with scan_progress("making thumbnails", quiet=quiet) as progress:
                title = config.name if config is not None else ""
                page = render_page(analyses, title=title, thumbnails=thumbnails, limit=limit or 300, progress=progress)
            html.write_bytes(page.encode("utf-8"))
            typer.echo(f"{html}: {len(page) / 1e6:.1f} MB, opens in any browser", err=True)
        if as_json:
            report = report_as_dict(analyses, limit or 100, [f.as_dict() for f in findings])
            sys.stdout.write(json.dumps(report, indent=1, allow_nan=False) + "\n")
            return
        console = plain_console(stderr=html is not None)
        for finding in findings:
            console.print(f"[yellow]{finding.severity.value}[/yellow]: {escape(finding.text)}", soft_wrap=True)
        if html is None:
            for analysis in analyses:
                print_analysis(analysis, console, limit or 5)


def _make_room(html: Path) -> None:
    """Before a million images are read: the report's folder, and nothing in the report's place."""
    if html.is_dir():
        raise KohyaBucketError(f"--html is {html}, a folder: name a file in it, e.g. {html / 'report.html'}")
    try:
        html.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KohyaBucketError(f"--html is {html}, but cannot be written: {why_not_written(error)}") from error


def _refuse_both(context: typer.Context, config: Path, path: list[str] | None) -> None:
    what = f"--config {config} brings its own images and rules"
    if path:
        raise ConfigError(f"{what}: leave out {' '.join(path)}")
    refuse_beside(context, what, _OF_THE_CONFIG)


def _rule_name(rule: str | None, preset: str | None, bucket_config: Path | None) -> str:
    """The one rule that the options name, as `rule_from_name` takes it."""
    given = {
        "--rule": rule,
        "--preset": preset and f"preset:{preset}",
        "--bucket-config": bucket_config and f"file:{bucket_config}",
    }
    named = [option for option, name in given.items() if name is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} both name a bucket set: give one of them")
    return given[named[0]] or "kohya" if named else "kohya"
