"""`kohya-bucket compare`: the same images under different rules."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from kohya_bucket.cli.console import print_table, wide_console
from kohya_bucket.cli.sizes import SizedImages, parse_resolution, sizes_of
from kohya_bucket.errors import ConfigError
from kohya_bucket.reports.compare import COMPARABLE, GROUPS, Compared, comparable_rule, compare_rules


def register(app: typer.Typer) -> None:
    @app.command()
    def compare(
        path: Annotated[list[str], typer.Argument(help="Folders, files, lists, or one table of sizes.")],
        rules: Annotated[
            str, typer.Option(help=f"Names, separated by commas: {', '.join(COMPARABLE)}; trainers, all.")
        ] = "kohya,novelai,exact,auto",
        resolution: Annotated[str, typer.Option(help="sd-scripts' resolution: 1024 or 832,1216.")] = "1024",
        min_bucket_reso: Annotated[int, typer.Option(help="As in sd-scripts.")] = 256,
        max_bucket_reso: Annotated[
            int | None, typer.Option(min=1, help="As in sd-scripts; twice the side if not given.")
        ] = None,
        bucket_reso_steps: Annotated[int, typer.Option(help="As in sd-scripts.")] = 64,
        bucket_no_upscale: Annotated[bool, typer.Option("--bucket-no-upscale", help="As in sd-scripts.")] = False,
        switching: Annotated[
            str | None, typer.Option(help="midpoint, geometric or area, for rules with a set.")
        ] = None,
        max_crop: Annotated[
            float | None, typer.Option(help="Largest share that may be cropped off, e.g. 0.05.")
        ] = None,
        num: Annotated[int, typer.Option("--num", "-n", help="Buckets of the rule auto.")] = 8,
        batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images per step.")] = 4,
        recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
        workers: Annotated[int | None, typer.Option(min=1, help="At most this many threads or processes.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    ) -> None:
        """Compare rules, also those of other trainers, on your images: crops, upscaling, batches."""
        images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
        max_reso = parse_resolution(resolution)
        high = max_bucket_reso or -(-2 * max(max_reso) // max(bucket_reso_steps, 1)) * bucket_reso_steps
        parts = [part.strip() for part in rules.split(",") if part.strip()]
        if not parts:
            raise ConfigError(f"--rules is {rules!r}, but must be names separated by commas: {', '.join(COMPARABLE)}")
        names = dict.fromkeys(name for part in parts for name in GROUPS.get(part, (part,)))
        options: dict[str, Any] = {
            "max_reso": max_reso, "min_size": min_bucket_reso, "max_size": high, "reso_steps": bucket_reso_steps,
            "no_upscale": bucket_no_upscale, "switching": switching, "max_crop": max_crop, "num_buckets": num,
        }  # fmt: skip
        named = [(name, comparable_rule(name, images.sizes, **options)) for name in names]
        results = compare_rules(named, images.sizes, batch_size)
        if as_json:
            typer.echo(
                json.dumps(
                    {
                        "images": len(images.sizes),
                        "unreadable": images.unreadable,
                        "batch_size": batch_size,
                        "rules": [r.as_dict() for r in results],
                    },
                    indent=2,
                )
            )
        else:
            _print(images, results, batch_size)


def _print(images: SizedImages, results: list[Compared], batch_size: int) -> None:
    console = wide_console()
    console.print(f"{images}, batches of {batch_size}")
    head = ("rule", "buckets", "mean crop", "95%", "worst", "upscaled", "no bucket", "batches", "short")
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(head):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for result in results:
        s = result.summary
        table.add_row(
            result.name, str(s.buckets), f"{s.mean_crop:.2%}", f"{s.p95_crop:.2%}", f"{s.worst_crop:.2%}",
            f"{s.enlarged:.1%}", str(s.unplaced), str(s.batches), str(s.short_batches),
        )  # fmt: skip
    print_table(console, table)
    for result in results:
        for reason, count in result.reasons.items():
            console.print(f"{result.name}: {count:,} without a bucket: {reason}", soft_wrap=True)
