"""`kohya-bucket compare`: the same images under different rules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.common_options import AsJson, Quiet, Recursive, TableOrSources, Workers
from kohya_bucket.cli.compared_rules import comparable, compared_rule, groups, names_of
from kohya_bucket.cli.console import print_table, wide_console
from kohya_bucket.cli.option_groups import with_option_groups
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.sizes import SizedImages, sizes_of
from kohya_bucket.texts import one_line

if TYPE_CHECKING:
    from kohya_bucket.reports.compare import Compared


def register(app: typer.Typer) -> None:
    app.command()(with_option_groups(compare, without=("rule", "preset", "bucket_config", "no_upscale_fit")))


def compare(
    path: TableOrSources,
    rules: Annotated[
        str, typer.Option(help="Names, separated by commas: {}."), lambda: ", ".join([*comparable(), *groups()])
    ] = "kohya,novelai,exact,auto",
    *,
    options: RuleOptions,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per step.")] = 4,
    recursive: Recursive = True,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from kohya_bucket.reports.compare import compare_rules

    names = names_of(rules)
    images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
    results = compare_rules(
        [(name, compared_rule(name, options, images.sizes)) for name in names], images.sizes, batch_size
    )
    if as_json:
        report = {
            "images": len(images.sizes),
            "unreadable": images.unreadable,
            "batch_size": batch_size,
            "rules": [result.as_dict() for result in results],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(images, results, batch_size)


def _print(images: SizedImages, results: list[Compared], batch_size: int) -> None:
    from rich.table import Table

    console = wide_console()
    console.print(f"{images}, batches of {batch_size}")
    head = ("rule", "buckets", "mean crop", "95%", "worst", "upscaled", "no bucket", "batches", "short")
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(head):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for result in results:
        s = result.summary
        table.add_row(
            one_line(result.name), str(s.buckets), f"{s.mean_crop:.2%}", f"{s.p95_crop:.2%}", f"{s.worst_crop:.2%}",
            f"{s.enlarged:.1%}", str(s.unplaced), str(s.batches), str(s.short_batches),
        )  # fmt: skip
    print_table(console, table)
    for result in results:
        for reason, count in result.reasons.items():
            console.print(f"{result.name}: {count:,} without a bucket: {reason}", soft_wrap=True)
