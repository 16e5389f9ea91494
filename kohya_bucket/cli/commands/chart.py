"""`kohya-bucket chart`: bucket aspects and switching points on one axis."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.common_options import Recursive
from kohya_bucket.cli.console import plain_console, print_table, say
from kohya_bucket.cli.option_groups import with_option_groups
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.sizes import images_in, sizes_of
from kohya_bucket.errors import ConfigError
from kohya_bucket.files import replace_file
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketSet


def register(app: typer.Typer) -> None:
    without = ("bucket_no_upscale", "no_upscale_fit", "max_crop")
    app.command()(with_option_groups(chart, without, also={"switching": "--method"}))


def chart(
    path: Annotated[list[str] | None, typer.Argument(help="Images to show as bars on the axis.")] = None,
    *,
    options: RuleOptions,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Draw to this .svg or .png file.")] = None,
    recursive: Recursive = True,
) -> None:
    if path:
        inputs = [*path, options.bucket_config, *images_in(path, recursive=recursive)]
        check_output("--output", output, "a picture", inputs)
    sizes = sizes_of(path, recursive=recursive).sizes if path else None
    rule = options.make(sizes)
    if rule.bucket_set is None:
        raise ConfigError(f"rule {options.name!r} has no fixed set of buckets, so there is nothing to draw")
    switching = str(getattr(rule, "switching", "midpoint"))
    if output is None:
        _print(rule.bucket_set, switching)
        return
    from kohya_bucket.reports.aspect_chart import aspect_chart

    drawing = aspect_chart(rule.bucket_set, switching, sizes)
    suffix = output.suffix.lower()
    if suffix == ".svg":
        replace_file(output, drawing.to_svg().encode("utf-8"))
    elif suffix == ".png":
        buffer = io.BytesIO()
        drawing.to_image(2).save(buffer, "PNG", optimize=True)
        replace_file(output, buffer.getvalue())
    else:
        raise ConfigError(f"--output is {output}, but a chart is drawn as .svg or .png")
    say(f"wrote {output}")


def _print(bucket_set: BucketSet, switching: str) -> None:
    from rich.table import Table

    from kohya_bucket.buckets import switching_points

    table = Table("from", "to", "at width / height", "at height / width", box=None, pad_edge=False)
    for point in switching_points(bucket_set, switching):
        table.add_row(str(point.narrower), str(point.wider), f"{point.aspect:.4f}", f"{1 / point.aspect:.4f}")
    console = plain_console()
    console.print(f"{bucket_set.name}: {counted(len(bucket_set), 'bucket')}, switching by {switching}")
    print_table(console, table)
