"""`kohya-bucket buckets list|chart|make`: bucket sets are listed, drawn and made."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.buckets.choices import AUTO_METHODS, described
from kohya_bucket.cli.console import plain_console, print_table, say
from kohya_bucket.cli.help import rare
from kohya_bucket.cli.options import (
    AsJson,
    Family,
    Quiet,
    Recursive,
    RuleOptions,
    TableOrSources,
    Workers,
    check_output,
    refuse_beside,
    with_option_groups,
)
from kohya_bucket.errors import BucketSettingsError, ConfigError, KohyaBucketError
from kohya_bucket.files import replace_file
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule, BucketSet
    from kohya_bucket.buckets.rules.auto import AutoBucketResult
    from kohya_bucket.buckets.sizes import IntArray

_LOW_FILL = 0.75
_DEFAULT = "sd-scripts"  # its own buckets
_OF_OTHER_RULES = (
    "rule", "preset", "bucket_config", "bucket_no_upscale", "switching", "no_upscale_fit", "max_crop",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command("list")(with_option_groups(list_))
    without = ("bucket_no_upscale", "no_upscale_fit", "max_crop")
    app.command()(with_option_groups(chart, without, also={"switching": "--method"}))
    also = {"bucket_reso_steps": "--vae-factor"}
    app.command()(with_option_groups(make, without=_OF_OTHER_RULES, also=also))


def make(
    context: typer.Context,
    path: TableOrSources,
    *,
    options: RuleOptions,
    target: Annotated[
        int | None,
        typer.Option(
            "--target", "-t", help="Instead of --resolution: one side, without limits for the sides of buckets."
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="{}."), partial(described, AUTO_METHODS)] = "kmeans",
    min_fill: Annotated[
        float, typer.Option(help="For optimal: a bucket has at least this share of the target's area; 0 allows any.")
    ] = _LOW_FILL,
    name: Annotated[str, typer.Option("--name", help="Name in the file.")] = "auto",
    seed: Annotated[int, rare("--seed", help="Only used if k-means can start in several ways.")] = 0,
    compare_to: Annotated[
        str | None, typer.Option("--compare-to", help="A preset, or a set in a .toml file, to compare with.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the set to this TOML file.")] = None,
    arch: Family = None,
    recursive: Recursive = True,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a bucket set from the aspects of your images, and print what it crops."""
    options = options.for_arch(context, arch)
    from kohya_bucket.buckets import FixedBuckets, bucket_set_to_toml, generate_buckets
    from kohya_bucket.cli.sources import sizes_of

    check_output("--output", output, "a bucket set", path)
    if output is not None and output.is_file() and output.stat().st_size:
        _refuse_other(output)
    if target is not None:
        beside = ("resolution", "min_bucket_reso", "max_bucket_reso")
        refuse_beside(context, f"--target {target} is an area for sides of any length", beside)
    size, *sides = (options.size, *options.limits) if target is None else ((target, target), None, None)
    images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
    result = generate_buckets(
        images.sizes, method=method, min_fill=min_fill, num_buckets=options.num_buckets, target=size,
        vae_factor=options.bucket_reso_steps, seed=seed, name=name, min_side=sides[0], max_side=sides[1],
        description=f"Generated ({method}) from {counted(len(images.sizes), 'image')}",
    )  # fmt: skip
    made = _Compared("auto", FixedBuckets(result.bucket_set), images.sizes)
    compared = [] if compare_to is None else [_Compared(compare_to, _set_named(compare_to), images.sizes)]
    default = _default_rule(options, target)
    if default is not None:
        compared.append(_Compared(_DEFAULT, default, images.sizes))
    if output is not None:
        replace_file(output, bucket_set_to_toml(result.bucket_set).encode("utf-8"))
    if as_json:
        summary = _summary(result, images.unreadable, made.loss, compared, compare_to, output)
        typer.echo(json.dumps({"root": images.source, **summary}, indent=2))
        return
    say(str(images))
    _print(result, made, compared, size[0] * size[1])
    say()
    if output is None:
        say("To train with it, write it to a file: --output my_buckets.toml")
    else:
        say(f"Wrote bucket set to {output}")
        _say_use(output, options.bucket_reso_steps)


class _Compared:
    """A rule with its own set, and what it crops of the images on average, as `analyze` has it."""

    def __init__(self, name: str, rule: BucketRule, sizes: IntArray) -> None:
        import numpy as np

        self.name, self.buckets = name, len(rule.bucket_set or ())
        self.loss = float(np.nanmean(rule.place(sizes).crop_loss))


def _refuse_other(output: Path) -> None:
    """A file that is no bucket set, such as the dataset config beside it, is not written over."""
    from kohya_bucket.buckets import load_from_toml

    try:
        load_from_toml(output)
    except KohyaBucketError as error:
        raise KohyaBucketError(
            f"--output is {output}, a file that is not a bucket set, and it would be overwritten: give another "
            "name, or delete it first"
        ) from error


def _set_named(compare_to: str) -> BucketRule:
    from kohya_bucket.buckets import FixedBuckets, load_from_toml, load_preset

    by_name = load_from_toml if compare_to.lower().endswith(".toml") else load_preset
    return FixedBuckets(by_name(compare_to))


def _default_rule(options: RuleOptions, target: int | None) -> BucketRule | None:
    """sd-scripts' own rule with these options, or at this target; None where it would have none."""
    if target is not None:
        lowest, longest = min(options.min_bucket_reso, target), max(options.max_bucket_reso, 2 * target)
        options = replace(options, resolution=str(target), min_bucket_reso=lowest, max_bucket_reso=longest)
    try:
        return options.make()
    except BucketSettingsError:
        return None


def _say_use(output: Path, steps: int) -> None:
    """The lines of a dataset config that train with the file."""
    import toml

    say("To train with it, in the dataset config:")
    say("  [kohya_bucket]")
    say("  " + toml.dumps({"rule": f"file:{output}"}).rstrip())
    if steps != RuleOptions.bucket_reso_steps:
        say(f"and bucket_reso_steps = {steps} in its [[datasets]]")


def _print(result: AutoBucketResult, made: _Compared, compared: Sequence[_Compared], area: int) -> None:
    converged = f"k-means converged in {counted(result.iterations, 'iteration')}"
    how = converged if result.method == "kmeans" else "exact optimum"
    say()
    say(f"Generated {counted(len(result.bucket_set), 'bucket')} (requested {result.requested_k}, {how}):")
    for bucket, centre, size in zip(result.bucket_set, result.cluster_centers, result.cluster_sizes, strict=True):
        fill = bucket.pixel_count / area
        say(
            f"  {bucket!s:<12} AR={bucket.aspect_ratio:6.3f}  cluster log-AR={centre:6.3f}  size={size}  "
            f"area={fill:.0%}"
        )
    width = max(len(f"({name})") for name in ("auto", *(one.name for one in compared)))
    say()
    say(f"Mean crop loss {'(auto)':<{width}}  {made.loss:6.2%}")
    for one in compared:
        points = (made.loss - one.loss) * 100
        label = f"({one.name})"
        say(f"Mean crop loss {label:<{width}}  {one.loss:6.2%}  (auto is {points:+.2f} pts vs {one.name})")
    for one in compared:
        if one.name == _DEFAULT and made.loss > one.loss:
            crop = counted(made.buckets, "bucket", "crops", "crop")
            say()
            say(
                f"{'This' if made.buckets == 1 else 'These'} {crop} more than sd-scripts' own {one.buckets}: "
                "raise --num, or train with sd-scripts' own"
            )


def _summary(
    result: AutoBucketResult,
    unreadable: int,
    loss: float,
    compared: Sequence[_Compared],
    compare_to: str | None,
    output: Path | None,
) -> dict[str, Any]:
    losses = {one.name: one.loss for one in compared}
    return {
        "readable": sum(result.cluster_sizes),
        "broken": unreadable,
        "method": result.method,
        "requested_k": result.requested_k,
        "iterations": result.iterations,
        "crop_loss_mean": loss,
        "compare_to": compare_to,
        "compare_to_crop_loss_mean": losses.get(compare_to or ""),
        "default_crop_loss_mean": losses.get(_DEFAULT),
        "buckets": [
            {
                "width": b.width,
                "height": b.height,
                "aspect_ratio": b.aspect_ratio,
                "cluster_log_ar": centre,
                "cluster_size": size,
            }
            for b, centre, size in zip(result.bucket_set, result.cluster_centers, result.cluster_sizes, strict=True)
        ],
        "output_path": str(output) if output else None,
    }


def chart(
    context: typer.Context,
    path: Annotated[list[str] | None, typer.Argument(help="Images to show as bars on the axis.")] = None,
    *,
    options: RuleOptions,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Draw to this .svg or .png file.")] = None,
    arch: Family = None,
    recursive: Recursive = True,
) -> None:
    """Which aspects go to which bucket: a table, or with --output a picture."""
    sizes, options = None, options.for_arch(context, arch)
    if path:
        from kohya_bucket.cli.sources import images_in, sizes_of

        inputs = [*path, options.bucket_config, *images_in(path, recursive=recursive)]
        check_output("--output", output, "a picture", inputs)
        sizes = sizes_of(path, recursive=recursive).sizes
    rule = options.make(sizes)
    if rule.bucket_set is None:
        raise ConfigError(f"rule {options.name!r} has no fixed set of buckets, so there is nothing to draw")
    switching = str(getattr(rule, "switching", "midpoint"))
    if output is None:
        _print_points(rule.bucket_set, switching)
        return
    from kohya_bucket.reports.chart import aspect_chart

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


def _print_points(bucket_set: BucketSet, switching: str) -> None:
    from rich.table import Table

    from kohya_bucket.buckets import switching_points

    table = Table("from", "to", "at width / height", "at height / width", box=None, pad_edge=False)
    for point in switching_points(bucket_set, switching):
        table.add_row(str(point.narrower), str(point.wider), f"{point.aspect:.4f}", f"{1 / point.aspect:.4f}")
    console = plain_console()
    console.print(f"{bucket_set.name}: {counted(len(bucket_set), 'bucket')}, switching by {switching}")
    print_table(console, table)


def list_(as_json: AsJson = False) -> None:
    """The bundled bucket sets and their sizes."""
    from kohya_bucket.buckets import list_presets, load_preset

    sets = [load_preset(name) for name in list_presets()]
    if as_json:
        rows = {
            s.name: {
                "description": s.description,
                "vae_factor": s.vae_factor,
                "n_buckets": len(s),
                "buckets": [list(b) for b in s],
            }
            for s in sets
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    for s in sets:
        say(f"{s.name}  ({len(s)} buckets, multiples of {s.vae_factor})  {s.description}")
        sizes = textwrap.wrap(" ".join(map(str, s)), 96)
        for line in sizes:
            say(f"    {line}")
