"""`kohya-bucket chart`: bucket aspects and switching points on one axis."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kohya_bucket.buckets import BucketSet, rule_from_name, switching_points
from kohya_bucket.cli.console import plain_console, print_table
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.sizes import parse_resolution, sizes_of
from kohya_bucket.errors import ConfigError
from kohya_bucket.images import list_images
from kohya_bucket.reports.aspect_chart import aspect_chart


def register(app: typer.Typer) -> None:
    @app.command()
    def chart(
        path: Annotated[list[str] | None, typer.Argument(help="Images to show as bars on the axis.")] = None,
        resolution: Annotated[str, typer.Option(help="sd-scripts' resolution: 512 or 832,1216.")] = "512",
        rule: Annotated[str, typer.Option(help="kohya, novelai, preset:NAME, file:PATH, or auto.")] = "kohya",
        method: Annotated[str, typer.Option(help="midpoint, geometric or area.")] = "midpoint",
        min_bucket_reso: Annotated[int, typer.Option(help="As in sd-scripts.")] = 256,
        max_bucket_reso: Annotated[
            int | None, typer.Option(min=1, help="As in sd-scripts; twice the side if not given.")
        ] = None,
        bucket_reso_steps: Annotated[int, typer.Option(help="As in sd-scripts.")] = 64,
        output: Annotated[Path | None, typer.Option("--output", "-o", help="Draw to this .svg or .png file.")] = None,
        recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
    ) -> None:
        """Show which aspects go to which bucket: a table, or with --output a picture."""
        max_reso = parse_resolution(resolution)
        high = max_bucket_reso or -(-2 * max(max_reso) // max(bucket_reso_steps, 1)) * bucket_reso_steps
        if path:
            check_output("--output", output, "a picture", [*path, *list_images(path, recursive=recursive)])
        images = sizes_of(path, recursive=recursive) if path else None
        sizes = images.sizes if images else None
        bucket_set = rule_from_name(
            rule, max_reso=max_reso, min_size=min_bucket_reso, max_size=high, reso_steps=bucket_reso_steps, sizes=sizes
        ).bucket_set
        if bucket_set is None:
            raise ConfigError(f"rule {rule!r} has no fixed set of buckets, so there is nothing to draw")
        if output is None:
            _print(bucket_set, method)
            return
        drawing = aspect_chart(bucket_set, method, sizes)
        suffix = output.suffix.lower()
        if suffix in (".svg", ".png"):
            output.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".svg":
            output.write_text(drawing.to_svg(), encoding="utf-8", newline="\n")
        elif suffix == ".png":
            buffer = io.BytesIO()
            drawing.to_image(2).save(buffer, "PNG", optimize=True)
            output.write_bytes(buffer.getvalue())
        else:
            raise ConfigError(f"--output is {output}, but a chart is drawn as .svg or .png")
        typer.echo(f"wrote {output}")


def _print(bucket_set: BucketSet, method: str) -> None:
    points = switching_points(bucket_set, method)
    table = Table("from", "to", "at width / height", "at height / width", box=None, pad_edge=False)
    for point in points:
        table.add_row(str(point.narrower), str(point.wider), f"{point.aspect:.4f}", f"{1 / point.aspect:.4f}")
    console = plain_console()
    console.print(f"{bucket_set.name}: {len(bucket_set)} buckets, switching by {method}")
    print_table(console, table)
