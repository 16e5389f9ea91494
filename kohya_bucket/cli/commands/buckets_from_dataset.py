"""`kohya-bucket buckets-from-dataset`: a bucket set made from the images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.buckets.choices import AUTO_METHODS, described
from kohya_bucket.cli.common_options import AsJson, Quiet, Recursive, TableOrSources, Workers
from kohya_bucket.cli.console import say
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.cli.option_groups import with_option_groups
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.sizes import sizes_of
from kohya_bucket.files import replace_file

if TYPE_CHECKING:
    from kohya_bucket.buckets.auto_sets.generate import AutoBucketResult
    from kohya_bucket.buckets.sizes import IntArray

_LOW_FILL = 0.75
_OF_OTHER_RULES = (
    "rule", "preset", "bucket_config", "bucket_no_upscale", "switching", "no_upscale_fit", "max_crop",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    also = {"bucket_reso_steps": "--vae-factor"}
    app.command()(with_option_groups(buckets_from_dataset, without=_OF_OTHER_RULES, also=also))


def buckets_from_dataset(
    context: typer.Context,
    path: TableOrSources,
    *,
    options: RuleOptions,
    target: Annotated[
        int | None, typer.Option("--target", "-t", help="Instead of --resolution: a side, and no limits of the sides.")
    ] = None,
    method: Annotated[str, typer.Option(help="{}."), partial(described, AUTO_METHODS)] = "kmeans",
    min_fill: Annotated[
        float, typer.Option(help="optimal: least share of the target's area a bucket has; 0 allows any.")
    ] = _LOW_FILL,
    name: Annotated[str, typer.Option("--name", help="Name in the file.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Decides only where k-means' start is ambiguous.")] = 0,
    compare_to: Annotated[
        str | None, typer.Option("--compare-to", help="A preset, or a set in a .toml file, to compare with.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the set to this TOML file.")] = None,
    recursive: Recursive = True,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from kohya_bucket.buckets import bucket_set_to_toml, generate_buckets

    check_output("--output", output, "a bucket set", path)
    if target is not None:
        beside = ("resolution", "min_bucket_reso", "max_bucket_reso")
        refuse_beside(context, f"--target {target} is an area for sides of any length", beside)
    size, *sides = (options.size, *options.limits) if target is None else ((target, target), None, None)
    images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
    result = generate_buckets(
        images.sizes, num_buckets=options.num, target=size, vae_factor=options.bucket_reso_steps, seed=seed, name=name,
        method=method, min_side=sides[0], max_side=sides[1], min_fill=min_fill,
        description=f"Generated ({method}) from {len(images.sizes)} images",
    )  # fmt: skip
    compared = None if compare_to is None else (compare_to, _loss(images.sizes, compare_to))
    if output is not None:
        replace_file(output, bucket_set_to_toml(result.bucket_set).encode("utf-8"))
    if as_json:
        summary = _summary(result, images.unreadable, compared, output)
        typer.echo(json.dumps({"root": images.source, **summary}, indent=2))
        return
    say(str(images))
    _print(result, compared, size[0] * size[1])
    if output is not None:
        say()
        say(f"Wrote bucket set to {output}")


def _loss(sizes: IntArray, compare_to: str) -> float:
    from kohya_bucket.buckets import load_from_toml, load_preset
    from kohya_bucket.buckets.auto_sets.generate import mean_crop_loss

    other = load_from_toml(compare_to) if compare_to.lower().endswith(".toml") else load_preset(compare_to)
    return mean_crop_loss(sizes, other)


def _print(result: AutoBucketResult, compared: tuple[str, float] | None, area: int) -> None:
    how = f"k-means converged in {result.iterations} iterations" if result.method == "kmeans" else "exact optimum"
    say()
    say(f"Generated {len(result.bucket_set)} buckets (requested {result.requested_k}, {how}):")
    for bucket, centre, size in zip(result.bucket_set, result.cluster_centers, result.cluster_sizes, strict=True):
        fill = bucket.pixel_count / area
        say(
            f"  {bucket!s:<12} AR={bucket.aspect_ratio:6.3f}  cluster log-AR={centre:6.3f}  size={size}  "
            f"area={fill:.0%}"
        )
    width = max(len(f"({name})") for name in ("auto", *([compared[0]] if compared else [])))
    say()
    say(f"Mean crop loss {'(auto)':<{width}}  {result.crop_loss_mean:6.2%}")
    if compared is not None:
        name, loss = compared
        points = (result.crop_loss_mean - loss) * 100
        say(f"Mean crop loss {f'({name})':<{width}}  {loss:6.2%}  (auto is {points:+.2f} pts vs {name})")


def _summary(
    result: AutoBucketResult, unreadable: int, compared: tuple[str, float] | None, output: Path | None
) -> dict[str, Any]:
    return {
        "readable": sum(result.cluster_sizes),
        "broken": unreadable,
        "method": result.method,
        "requested_k": result.requested_k,
        "iterations": result.iterations,
        "crop_loss_mean": result.crop_loss_mean,
        "compare_to": compared[0] if compared else None,
        "compare_to_crop_loss_mean": compared[1] if compared else None,
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
