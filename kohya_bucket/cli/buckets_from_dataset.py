"""`kohya-bucket buckets-from-dataset`: a bucket set made from the images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kohya_bucket.buckets import bucket_set_to_toml, generate_buckets, load_from_toml, load_preset
from kohya_bucket.buckets.auto import AutoBucketResult, mean_crop_loss
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.sizes import sizes_of

_LOW_FILL = 0.75


def register(app: typer.Typer) -> None:
    @app.command("buckets-from-dataset")
    def buckets_from_dataset(
        path: Annotated[list[str], typer.Argument(help="Folders, files, lists, or one table of sizes.")],
        num: Annotated[int, typer.Option("--num", "-n", help="Number of buckets.")] = 8,
        target: Annotated[int, typer.Option("--target", "-t", help="Side whose area the buckets have.")] = 1024,
        method: Annotated[str, typer.Option(help="kmeans, or optimal: the set that crops least.")] = "kmeans",
        min_fill: Annotated[
            float, typer.Option(help="optimal: least share of the target's area a bucket has; 0 allows any.")
        ] = _LOW_FILL,
        vae_factor: Annotated[int, typer.Option("--vae-factor", help="Every side is a multiple of this.")] = 64,
        name: Annotated[str, typer.Option("--name", help="Name in the file.")] = "auto",
        seed: Annotated[int, typer.Option("--seed", help="Decides only where k-means' start is ambiguous.")] = 0,
        compare_to: Annotated[
            str | None, typer.Option("--compare-to", help="A preset, or a set in a .toml file, to compare with.")
        ] = None,
        output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the set to this TOML file.")] = None,
        recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
        workers: Annotated[int | None, typer.Option(min=1, help="At most this many threads or processes.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    ) -> None:
        """Make a bucket set from your images' aspects, and say what it crops."""
        check_output("--output", output, "a bucket set", path)
        images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
        result = generate_buckets(
            images.sizes, num_buckets=num, target=target, vae_factor=vae_factor, seed=seed, name=name, method=method,
            min_fill=min_fill, description=f"Generated ({method}) from {len(images.sizes)} images",
        )  # fmt: skip
        compared = None
        if compare_to is not None:
            other = load_from_toml(compare_to) if compare_to.lower().endswith(".toml") else load_preset(compare_to)
            compared = (compare_to, mean_crop_loss(images.sizes, other))
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(bucket_set_to_toml(result.bucket_set), encoding="utf-8", newline="\n")
        if as_json:
            summary = _summary(result, images.unreadable, compared, output)
            typer.echo(json.dumps({"root": images.source, **summary}, indent=2))
            return
        typer.echo(str(images))
        _print(result, compared, target)
        if output is not None:
            typer.echo(f"\nWrote bucket set to {output}")


def _print(result: AutoBucketResult, compared: tuple[str, float] | None, target: int) -> None:
    how = f"k-means converged in {result.iterations} iterations" if result.method == "kmeans" else "exact optimum"
    typer.echo(f"\nGenerated {len(result.bucket_set)} buckets (requested {result.requested_k}, {how}):")
    for bucket, centre, size in zip(result.bucket_set, result.cluster_centers, result.cluster_sizes, strict=True):
        fill = bucket.pixel_count / target**2
        typer.echo(
            f"  {bucket!s:<12} AR={bucket.aspect_ratio:6.3f}  cluster log-AR={centre:6.3f}  size={size}  "
            f"area={fill:.0%}"
        )
    width = max(len(f"({name})") for name in ("auto", *([compared[0]] if compared else [])))
    typer.echo(f"\nMean crop loss {'(auto)':<{width}}  {result.crop_loss_mean:6.2%}")
    if compared is not None:
        name, loss = compared
        points = (result.crop_loss_mean - loss) * 100
        typer.echo(f"Mean crop loss {f'({name})':<{width}}  {loss:6.2%}  (auto is {points:+.2f} pts vs {name})")


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
