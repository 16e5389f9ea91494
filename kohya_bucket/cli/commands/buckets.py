"""`kohya-bucket buckets list|chart|make`: bucket sets are listed, drawn and made."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.buckets.choices import AUTO_METHODS, described
from kohya_bucket.buckets.rules.registry import named_rule
from kohya_bucket.cli.console import plain_console, print_table, say
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import (
    AsJson,
    Quiet,
    Recursive,
    RuleArguments,
    TableOrSources,
    check_output,
    refuse_beside,
)
from kohya_bucket.errors import BucketSettingsError, ConfigError, KohyaBucketError
from kohya_bucket.files import replace_file
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.rules.auto import AutoBucketResult

_TARGET_HELP = "Instead of --resolution: one side, without limits for the sides of buckets."
_DEFAULT = "sd-scripts"  # its own buckets
_MIN_FILL = 0.75  # of the area that is asked for, so that an optimal set holds no small buckets
_GENERATED = "Generated"  # begins the description of every set that `make` writes
SUBCOMMANDS = "list_", "chart", "make"
_OF_ONE_IMAGE = ("bucket_no_upscale", "no_upscale_fit", "max_crop")
_WITH_OWN_SET = ("rule", "preset", "bucket_config", "switching")
OPTION_GROUPS = {
    "chart": {"without": _OF_ONE_IMAGE},
    "make": {"without": (*_WITH_OWN_SET, *_OF_ONE_IMAGE)},
}


def make(
    context: typer.Context,
    path: TableOrSources,
    *,
    options: RuleArguments,
    target: int | None = opt(None, _TARGET_HELP, "--target", "-t"),
    method: str = opt("kmeans", lambda: f"{described(AUTO_METHODS)}."),
    compare_to: str | None = opt(None, "A preset, or a set in a .toml file, to compare with.", "--compare-to"),
    output: Path | None = opt(None, "Write the set to this TOML file.", "--output", "-o"),
    arch: str | None = opt(None),
    recursive: Recursive = True,
    workers: int | None = opt(None, usual=False, min=1),
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make a bucket set from your images, and say what it crops."""
    import numpy as np

    from kohya_bucket.buckets import FixedBuckets, bucket_set_to_toml, generate_buckets
    from kohya_bucket.cli.sources import sizes_of
    from kohya_bucket.trainers.door.dataset_keys import adjust_to_steps

    options = options.for_arch(context, arch)
    check_output("--output", output, "a bucket set", path, _is_generated)
    if target is not None:
        beside = ("resolution", "min_bucket_reso", "max_bucket_reso")
        refuse_beside(context, f"--target {target} is an area for sides of any length", beside)
    size, *sides = (options.size, *adjust_to_steps(options.keys)) if target is None else ((target, target), None, None)
    images = sizes_of(path, recursive=recursive, workers=workers, quiet=quiet or as_json)
    result = generate_buckets(
        images.sizes, method=method, min_fill=_MIN_FILL, num_buckets=options.num_buckets, target=size,
        vae_factor=options.bucket_reso_steps, name="auto", min_side=sides[0], max_side=sides[1],
        description=f"{_GENERATED} ({method}) from {counted(len(images.sizes), 'image')}",
    )  # fmt: skip
    rules = {"auto": FixedBuckets(result.bucket_set), **_others(options, target, compare_to)}
    losses = {name: float(np.nanmean(rule.place(images.sizes).crop_loss)) for name, rule in rules.items()}
    if output is not None:
        replace_file(output, bucket_set_to_toml(result.bucket_set).encode("utf-8"))
    if as_json:
        summary = _summary(result, losses, compare_to) | {"output_path": str(output) if output else None}
        typer.echo(json.dumps({"root": images.source, "broken": images.unreadable, **summary}, indent=2))
        return
    say(str(images))
    _print(result, losses, size[0] * size[1])
    if losses["auto"] > losses.get(_DEFAULT, 1.0):
        made, of_sd_scripts = (len(rules[name].bucket_set or ()) for name in ("auto", _DEFAULT))
        what = "This bucket crops" if made == 1 else f"These {made} buckets crop"
        say()
        say(f"{what} more than sd-scripts' own {of_sd_scripts}: raise --num, or train with sd-scripts' own")
    _say_use(output, options.bucket_reso_steps)


def _others(options: RuleArguments, target: int | None, compare_to: str | None) -> dict[str, BucketRule]:
    """What the set is compared with: the one that is named, and sd-scripts' own rule, if it works with the options."""
    from kohya_bucket.buckets import FixedBuckets, load_from_toml, load_preset

    out: dict[str, BucketRule] = {}
    if compare_to is not None:
        by_name = load_from_toml if compare_to.lower().endswith(".toml") else load_preset
        out[compare_to] = FixedBuckets(by_name(compare_to))
    if target is not None:
        lowest, longest = min(options.min_bucket_reso, target), max(options.max_bucket_reso, 2 * target)
        options = replace(options, resolution=str(target), min_bucket_reso=lowest, max_bucket_reso=longest)
    with contextlib.suppress(BucketSettingsError):
        out[_DEFAULT] = replace(options, **named_rule("kohya").not_taken).make()
    return out


def _is_generated(file: Path) -> bool:
    """Whether this command wrote the set: one that somebody wrote by hand is a set too."""
    from kohya_bucket.buckets import load_from_toml

    with contextlib.suppress(KohyaBucketError):
        return load_from_toml(file).description.startswith(_GENERATED)
    return False


def _say_use(output: Path | None, steps: int) -> None:
    """The lines of a dataset config that train with the file."""
    import toml

    say()
    if output is None:
        say("To train with it, write it to a file: --output my_buckets.toml")
        return
    say(f"Wrote bucket set to {output}")
    say("To train with it, in the dataset config:")
    say("  [kohya_bucket]")
    say("  " + toml.dumps({"rule": f"file:{output}"}).rstrip())
    if steps != RuleArguments.bucket_reso_steps:
        say(f"and bucket_reso_steps = {steps} in its [[datasets]]")


def _print(result: AutoBucketResult, losses: Mapping[str, float], area: int) -> None:
    how = "exact optimum"
    if result.method == "kmeans":
        how = f"k-means converged in {counted(result.iterations, 'iteration')}"
    say()
    say(f"Generated {counted(len(result.bucket_set), 'bucket')} (requested {result.requested_k}, {how}):")
    for bucket, centre, size in zip(result.bucket_set, result.cluster_centers, result.cluster_sizes, strict=True):
        aspect, fill = f"AR={bucket.aspect_ratio:6.3f}", bucket.pixel_count / area
        say(f"  {bucket!s:<12} {aspect}  cluster log-AR={centre:6.3f}  size={size}  area={fill:.0%}")
    say()
    width = max(map(len, losses)) + 2
    for name, loss in losses.items():
        points = "" if name == "auto" else f"  (auto is {(losses['auto'] - loss) * 100:+.2f} pts vs {name})"
        say(f"Mean crop loss {f'({name})':<{width}}  {loss:6.2%}{points}")


def _summary(result: AutoBucketResult, losses: Mapping[str, float], compare_to: str | None) -> dict[str, Any]:
    clusters = zip(result.bucket_set, result.cluster_centers, result.cluster_sizes, strict=True)
    return {
        "readable": sum(result.cluster_sizes),
        "method": result.method,
        "requested_k": result.requested_k,
        "iterations": result.iterations,
        "crop_loss_mean": losses["auto"],
        "compare_to": compare_to,
        "compare_to_crop_loss_mean": losses.get(compare_to or ""),
        "default_crop_loss_mean": losses.get(_DEFAULT),
        "buckets": [
            {"width": b.width, "height": b.height, "aspect_ratio": b.aspect_ratio, "cluster_log_ar": centre,
             "cluster_size": size}
            for b, centre, size in clusters
        ],
    }  # fmt: skip


def chart(
    context: typer.Context,
    path: Annotated[list[str] | None, typer.Argument(help="Images to show as bars on the axis.")] = None,
    *,
    options: RuleArguments,
    output: Path | None = opt(None, "Draw to this .svg file.", "--output", "-o"),
    arch: str | None = opt(None),
    recursive: Recursive = True,
) -> None:
    """Which aspects go to which bucket, as a table or a picture."""
    from kohya_bucket.cli.sources import sizes_of

    options, path = options.for_arch(context, arch), path or []
    check_output("--output", output, "a picture", [*path, options.bucket_config])
    options.check()
    sizes = sizes_of(path, recursive=recursive).sizes if path else None
    rule = options.make(sizes)
    bucket_set, switching = rule.bucket_set, str(getattr(rule, "switching", "midpoint"))
    if bucket_set is None:
        raise ConfigError(f"rule {options.name!r} has no fixed set of buckets, so there is nothing to draw")
    if output is None:
        from kohya_bucket.buckets import switching_points

        rows = [
            {"from": str(p.narrower), "to": str(p.wider), "at width / height": f"{p.aspect:.4f}"}
            | {"at height / width": f"{1 / p.aspect:.4f}"}
            for p in switching_points(bucket_set, switching)
        ]
        console = plain_console()
        console.print(f"{bucket_set.name}: {counted(len(bucket_set), 'bucket')}, switching by {switching}")
        if rows:
            print_table(console, rows, left=4)
        return
    from kohya_bucket.reports.chart import aspect_chart

    if output.suffix.lower() != ".svg":
        raise ConfigError(f"--output is {output}, but a chart is drawn as .svg")
    replace_file(output, aspect_chart(bucket_set, switching, sizes).to_svg().encode("utf-8"))
    say(f"wrote {output}")


def list_(as_json: AsJson = False) -> None:
    """The bundled bucket sets and their sizes."""
    from kohya_bucket.buckets import list_presets, load_preset

    sets = [load_preset(name) for name in list_presets()]
    if as_json:
        rows = {
            s.name: {"description": s.description, "vae_factor": s.vae_factor, "n_buckets": len(s)}
            | {"buckets": [list(b) for b in s]}
            for s in sets
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    for s in sets:
        say(f"{s.name}  ({len(s)} buckets, multiples of {s.vae_factor})")
        for text in (s.description, " ".join(map(str, s))):
            for line in textwrap.wrap(text, 80, initial_indent="    ", subsequent_indent="    "):
                say(line)
