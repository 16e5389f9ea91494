"""`kohya-bucket simulate`: one image's bucket, explained."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kohya_bucket.cli.console import plain_console
from kohya_bucket.cli.given import refuse_beside
from kohya_bucket.cli.outputs import check_output
from kohya_bucket.errors import BucketSettingsError, ConfigError, KohyaBucketError, why_not_written

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.reports.explain import Explanation

_RULE_OPTIONS = (
    "resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale", "rule"
)  # fmt: skip
_SIZE = re.compile(r"(\d+)\s*[xX×*,]\s*(\d+)")


def register(app: typer.Typer) -> None:
    @app.command()
    def simulate(
        context: typer.Context,
        image: Annotated[str, typer.Argument(help="a size such as 576x768, or an image file")],
        resolution: Annotated[str | None, typer.Option(help="512 or 512x768")] = None,
        min_bucket_reso: Annotated[int, typer.Option("--min-bucket-reso")] = 256,
        max_bucket_reso: Annotated[
            int | None, typer.Option("--max-bucket-reso", min=1, help="1024 by default, as in sd-scripts")
        ] = None,
        bucket_reso_steps: Annotated[int, typer.Option("--bucket-reso-steps")] = 64,
        bucket_no_upscale: Annotated[bool, typer.Option("--bucket-no-upscale", "--no-upscale")] = False,
        rule: Annotated[str, typer.Option(help="kohya, novelai, exact, preset:NAME or file:PATH")] = "kohya",
        config: Annotated[Path | None, typer.Option(help="take the settings of this dataset config")] = None,
        preview: Annotated[Path | None, typer.Option(help="draw the kept area into this picture")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
    ) -> None:
        """Explain one image: its bucket, the neighbours, the switching points, resize and crop."""
        from kohya_bucket.buckets.by_name import rule_from_name
        from kohya_bucket.reports.explain import explain

        if config is not None:
            refuse_beside(context, f"--config {config} brings its own rules", _RULE_OPTIONS)
        file, size = _size_of(image)
        check_output("--preview", preview, "a picture", [file, config])
        if config is not None:
            rules = _rules_of(config)
        else:
            area = _pair(resolution or "512")
            # sd-scripts' own default, unless the resolution leaves no room below it
            longest = max_bucket_reso or max(1024, -(-max(area) // max(bucket_reso_steps, 1)) * bucket_reso_steps)
            made = rule_from_name(
                rule,
                max_reso=area,
                min_size=min_bucket_reso,
                max_size=longest,
                reso_steps=bucket_reso_steps,
                no_upscale=bucket_no_upscale,
            )
            rules = [(f"{area[0]}x{area[1]}, {'no upscaling' if bucket_no_upscale else rule}", made)]
        found = [(name, explain(made, *size)) for name, made in rules]
        if as_json:
            typer.echo(json.dumps([{"settings": name, **_as_dict(e)} for name, e in found], indent=2))
        else:
            for name, explanation in found:
                _print(name, explanation)
        if preview is not None:
            _draw(file, found, preview)
        if all(explanation.bucket is None for _, explanation in found):
            raise typer.Exit(1)


def _size_of(image: str) -> tuple[Path | None, tuple[int, int]]:
    match = _SIZE.fullmatch(image.strip())
    if match:
        width, height = int(match[1]), int(match[2])
        if min(width, height) < 1:
            raise KohyaBucketError(f"{image} is no image size: both sides must be 1 or more")
        return None, (width, height)
    from kohya_bucket.images import read_sizes

    scan = read_sizes([image])
    if scan.failures:
        raise KohyaBucketError(f"{image} is neither a size such as 576x768 nor a readable image: {scan.failures[0][2]}")
    width, height = scan.sizes[0].tolist()
    return Path(image), (width, height)


def _pair(text: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(text.strip())
    if match:
        return int(match[1]), int(match[2])
    if text.strip().isdigit():
        return int(text), int(text)
    raise BucketSettingsError(f"resolution is {text!r}, but must be a number or two, e.g. 512 or 512x768")


def _rules_of(path: Path) -> list[tuple[str, BucketRule]]:
    from kohya_bucket.adapter.dataset_keys import at_resolutions, rule_for
    from kohya_bucket.adapter.options import AdapterOptions, environment_table
    from kohya_bucket.sdscripts.config import Severity, read_config

    read = read_config(path, check_captions=False)
    wrong = [f for f in read.findings if f.severity is Severity.ERROR and f.code not in ("missing-folder", "no-images")]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0].text}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
    settings = AdapterOptions.from_tables(
        *environment_table(), *([(str(path), read.table)] if read.table is not None else [])
    )
    if settings.rule == "auto":
        raise ConfigError(f"{path}: rule 'auto' depends on all images; `kohya-bucket plan {path} --images` shows them")
    rules = []
    for number, dataset in enumerate(read.datasets, 1):
        for one in at_resolutions(dataset.config.dataset_keys, settings):
            width, height = one.resolution
            rules.append((f"dataset {number} ({width}x{height})", rule_for(one, settings)))
    return rules


def _print(name: str, e: Explanation) -> None:
    console = plain_console()

    def line(label: str, text: str) -> None:
        console.print(f"  {label:<10}{text}", soft_wrap=True)

    console.print(f"[bold]{e.size[0]}x{e.size[1]}[/bold], aspect {e.aspect:.4f}, in {name}")
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


def _as_dict(e: Explanation) -> dict[str, Any]:
    return {**asdict(e), "aspect": e.aspect}


def _draw(file: Path | None, found: list[tuple[str, Explanation]], target: Path) -> None:
    from PIL import Image

    from kohya_bucket.reports.preview import draw_preview

    placed = [e for _, e in found if e.bucket is not None]
    if not placed:
        raise KohyaBucketError(f"no preview: {found[0][1].reason}")
    explanation = placed[0]
    try:
        image = Image.open(file) if file is not None else _grid(explanation.size)
        picture = draw_preview(image, explanation)
    except OSError as error:
        raise KohyaBucketError(f"{file} cannot be decoded: {error}") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        picture.save(target)
    except OSError as error:
        raise KohyaBucketError(f"the preview cannot be written to {target}: {why_not_written(error)}") from error
    except ValueError as error:
        raise KohyaBucketError(f"the preview cannot be written to {target}: {error}; name a .png file") from error
    typer.echo(f"preview of {explanation.bucket} in {target}", err=True)


def _grid(size: tuple[int, int]) -> Any:
    """A grey picture with a grid of eighths, to stand for an image of which only the size is known."""
    from PIL import Image, ImageDraw

    scale = min(1.0, 1024 / max(size))
    width, height = (max(1, round(side * scale)) for side in size)
    image = Image.new("RGB", (width, height), (200, 205, 212))
    draw = ImageDraw.Draw(image)
    for i in range(1, 8):
        draw.line([(width * i // 8, 0), (width * i // 8, height)], fill=(160, 166, 176))
        draw.line([(0, height * i // 8), (width, height * i // 8)], fill=(160, 166, 176))
    return image
