"""`kohya-bucket simulate`: one image's bucket, explained."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.cli.clip_simulation import ClipOptions, NamedRule, TakenClip, clip_of, musubi_rules
from kohya_bucket.cli.configs import given_config, rules_of_config
from kohya_bucket.cli.console import plain_console
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.cli.option_groups import with_option_groups
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.cli.previews import draw_into
from kohya_bucket.cli.rule_options import RuleOptions
from kohya_bucket.cli.sizes import not_read
from kohya_bucket.errors import KohyaBucketError

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.reports.explain import Explanation

_SIZE = re.compile(r"(\d+)\s*[xX×*,]\s*(\d+)")


def register(app: typer.Typer) -> None:
    app.command()(with_option_groups(simulate, without=("num",)))


def simulate(
    context: typer.Context,
    image: Annotated[str, typer.Argument(help="a size such as 576x768, an image; 1280x720x81 or a clip")],
    *,
    options: RuleOptions,
    clip_options: ClipOptions,
    config: Annotated[Path | None, typer.Option(help="take the rules of this dataset config")] = None,
    preview: Annotated[Path | None, typer.Option(help="draw the kept area into this picture")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    from kohya_bucket.reports.explain import explain

    config, options, _ = given_config(config, options)
    if config is not None:
        refuse_beside(context, f"--config {config} brings its own rules", options.fields)
    clip = clip_of(image)
    file, size, orientation = _size_of(image) if clip is None else (clip[0], clip[1].size, 1)
    foreign = "" if file is None or clip is not None else not_read([str(file)]).get(str(file), "")
    check_output("--preview", preview, "a picture", [file, config])
    rules = musubi_rules(context, config, options, clip_options, clip and clip[1])
    if rules is None:
        rules = [NamedRule(name, rule) for name, rule in _rules_of_images(config, options, size)]
    found = [(rule.name, explain(rule.picture, *size), rule.take(clip and clip[1])) for rule in rules]
    if as_json:
        rows = [_as_dict(*one, orientation) | {"not_read": foreign} for one in found]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for name, explanation, taken in found:
            _print(name, explanation, orientation, foreign, taken.lines() if taken else [])
    if preview is not None:
        still = None if clip else file  # of a clip, a grid stands for its frames
        draw_into(preview, still, [explanation for _, explanation, _ in found], orientation)
    if all(e.bucket is None or (taken and not taken.told["items"]) for _, e, taken in found):
        raise typer.Exit(1)


def _rules_of_images(config: Path | None, options: RuleOptions, size: tuple[int, int]) -> list[tuple[str, BucketRule]]:
    if config is not None:
        return rules_of_config(config, size)
    width, height = options.size
    how = "no upscaling" if options.bucket_no_upscale else options.name
    return [(f"{width}x{height}, {how}", options.make())]


def _as_dict(name: str, e: Explanation, taken: TakenClip | None, orientation: int) -> dict[str, Any]:
    row = {"settings": name, **asdict(e), "aspect": e.aspect, "exif_orientation": orientation}
    return row if taken is None else {**row, "clip": taken.told}


def _size_of(image: str) -> tuple[Path | None, tuple[int, int], int]:
    """The file, if it is one; the size; and the EXIF orientation."""
    match = _SIZE.fullmatch(image.strip())
    if match:
        width, height = int(match[1]), int(match[2])
        if min(width, height) < 1:
            raise KohyaBucketError(f"{image} is not an image size: both sides must be 1 or more")
        return None, (width, height), 1
    from kohya_bucket.images import read_sizes

    scan = read_sizes([image])
    if scan.failures:
        raise KohyaBucketError(f"{image} is neither a size such as 576x768 nor a readable image: {scan.failures[0][2]}")
    width, height = scan.sizes[0].tolist()
    return Path(image), (width, height), int(scan.orientation[0])


def _print(name: str, e: Explanation, orientation: int, foreign: str, of_clip: Sequence[tuple[str, str]] = ()) -> None:
    from kohya_bucket.images.headers import ORIENTATIONS

    console = plain_console()

    def line(label: str, text: str) -> None:
        console.print(f"  {label:<10}{text}", soft_wrap=True)

    console.print(f"[bold]{e.size[0]}x{e.size[1]}[/bold], aspect {e.aspect:.4f}, in {name}")
    if foreign:
        line("file", foreign)
    if orientation in ORIENTATIONS:
        line("EXIF", f"asks for: {ORIENTATIONS[orientation]}; training ignores it and takes the pixels as stored")
    if e.bucket is None:
        line("bucket", f"none: {e.reason}")
        return
    why = "exactly the image's size" if e.exact else f"aspect {e.bucket.aspect_ratio:.4f}, {e.distance:.4f} away"
    line("bucket", f"[bold green]{e.bucket}[/bold green]  ({why})")
    for other in e.neighbours:
        side = "narrower" if other.bucket.aspect_ratio < e.bucket.aspect_ratio else "wider"
        switch = "" if other.switch is None else f"; they switch at {other.switch:.4f}"
        if other.switch is not None and other.switch < 1:
            switch += f" (height/width {1 / other.switch:.4f})"
        line(side, f"{other.bucket!s:<10} aspect {other.bucket.aspect_ratio:.4f}, {other.distance:.4f} away{switch}")
    change = "enlarged" if e.scale > 1 else "reduced" if e.scale < 1 else "kept"
    line("resize", f"to {e.resized[0]}x{e.resized[1]}  ({change}, factor {e.scale:.3f})")
    left, top, right, bottom = e.cut
    parts = [f"{n} {side}" for n, side in ((left, "left"), (top, "top"), (right, "right"), (bottom, "bottom")) if n]
    line("crop", f"{', '.join(parts)}  ({e.crop_loss:.1%} of the picture)" if parts else "nothing")
    for label, text in of_clip:
        line(label, text)
