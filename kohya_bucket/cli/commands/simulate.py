"""`kohya-bucket simulate`: one image's bucket, or what becomes of a clip, explained."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.checks import path_meant
from kohya_bucket.cli.configs import given_config
from kohya_bucket.cli.console import plain_console, say
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import (
    CLIP_SIZE,
    AsJson,
    ClipOptions,
    RuleArguments,
    check_output,
    given,
    refuse_beside,
    saved_as,
)
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import argument
from kohya_bucket.files import replace_file
from kohya_bucket.images.formats import is_video
from kohya_bucket.inputs import open_input

if TYPE_CHECKING:
    from PIL.Image import Image

    from kohya_bucket.cli.clips import Clip, TakenClip
    from kohya_bucket.reports.explain import Explanation
    from kohya_bucket.trainers.door.face import OneItem


_SIZE = re.compile(r"(\d+)\s*[xX×*,]\s*(\d+)")
OPTION_GROUPS = {"simulate": {"without": ("num_buckets",)}}


def simulate(
    context: typer.Context,
    image: Annotated[str, typer.Argument(help="a size such as 576x768, an image; 1280x720x81 or a clip")],
    *,
    config: Path | None = opt(None),
    clip_options: ClipOptions,
    focus: str | None = opt(None, "keep this rectangle: left,top,right,bottom in shares of the picture; or a file"),
    preview: Path | None = opt(None, "draw the kept area into this picture"),
    as_json: AsJson = False,
    options: RuleArguments,
) -> None:
    from kohya_bucket.cli.clips import TakenClip, ways_to_train
    from kohya_bucket.images.headers import ORIENTATIONS
    from kohya_bucket.reports.explain import explain
    from kohya_bucket.trainers.door.face import Asked, Way
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.door.registry import trainer_for

    config, options, _ = given_config(config, options)
    if config is not None:
        refuse_beside(context, f"--config {config} brings its own rules", options.fields)
    arch, clip_options = clip_options.family()
    options = options.for_arch(context, arch)
    trainer = trainer_for("simulate", config)
    for_clips = clip_options != ClipOptions() or trainer.takes_clips
    item, clip, foreign = _item_of(image, for_clips)
    check_output("--preview", preview, "a picture", [item.file, config])
    asked = Asked(config, clip_options.arch)
    if item.is_clip or for_clips:
        ways, trained_with = ways_to_train(context, asked, options, clip_options, item, focus)
    elif config is not None:
        ways, trained_with = trainer.ways(asked, item, focus)
    else:
        ways, trained_with = [Way(options.title, options.make(), item.size)], AdapterOptions().with_focus(focus)
    kept = _rectangle(trained_with.focus, focus, item.file)
    explained = [
        (
            way.name,
            explain(way.rule, *way.size, kept),
            TakenClip(clip, way.clips, way.source_fps) if clip is not None and way.clips is not None else None,
        )
        for way in ways
    ]
    exif, obeyed = ORIENTATIONS.get(item.orientation, ""), trainer.turns_images
    if as_json:
        typer.echo(_as_json(explained, item.orientation, foreign))
    else:
        for name, explanation, of_clip in explained:
            more = of_clip.lines() if of_clip else []
            if config is None and not given(context, ["max_bucket_reso"]):
                more = [*more, *_with_longer_sides(options, explanation)]
            then = f"{trainer.name} turns the pixels accordingly" if obeyed else _IGNORED
            _print(name, explanation, exif and f"asks for: {exif}; {then}", foreign, more)
    if preview is not None:
        still = None if item.is_clip else item.file  # of a clip, a grid stands for its frames
        unturned = f", as stored, without what EXIF asks for ({exif})" if exif and not obeyed else ""
        _draw_into(preview, still, [explanation for _, explanation, _ in explained], unturned, obeyed)
    if all(e.bucket is None or (of_clip and not of_clip.told["items"]) for _, e, of_clip in explained):
        raise typer.Exit(1)


def _as_json(explained: Sequence[tuple[str, Explanation, TakenClip | None]], orientation: int, foreign: str) -> str:
    rows = [
        {"settings": name, **asdict(explanation), "aspect": explanation.aspect, "exif_orientation": orientation}
        | ({"clip": of_clip.told} if of_clip else {})
        | {"not_read": foreign}
        for name, explanation, of_clip in explained
    ]
    return json.dumps(rows, indent=2, default=lambda bucket: {"width": bucket.width, "height": bucket.height})


def _item_of(image: str, for_clips: bool) -> tuple[OneItem, Clip | None, str]:
    """What is named: the image or clip, its frames if it is a clip, and why no trainer lists such a file, if so."""
    from kohya_bucket.cli.clips import clip_of
    from kohya_bucket.cli.sources import not_read
    from kohya_bucket.trainers.door.face import OneItem

    if Path(image).is_dir() and not for_clips:
        raise KohyaBucketError(
            f"{image} is a folder, and one image is simulated: name one in it, or `kohya-bucket analyze "
            f"{argument(image)}` for all; if its images are the frames of a clip, add --arch wan or --target-frames"
        )
    if CLIP_SIZE.fullmatch(image.strip()) or is_video(image) or Path(image).is_dir():
        file, clip = clip_of(image)
        return OneItem(clip.size, 1, file, is_clip=True), clip, ""
    file, size, orientation = _size_of(image)
    return OneItem(size, orientation, file), None, "" if file is None else not_read([image]).get(image, "")


def _rectangle(focus: str | None, focus_argument: str | None, file: Path | None) -> tuple[float, ...] | None:
    """The rectangle that the options' focus is, or that its file has for the image; None where there is none.

    `focus_argument` is what `--focus` says.
    """
    from kohya_bucket.images.focus_files import focus_in, parsed_focus

    if focus is None:
        return None
    rectangle = parsed_focus(focus, "--focus")
    if rectangle is None and file is None and focus_argument is not None:
        raise KohyaBucketError(
            f"--focus is {focus_argument!r}, but a size has no name to look for in a file: give left,top,right,bottom"
        )
    if rectangle is None and file is not None and (rectangle := focus_in(focus, str(file))) is None:
        say(f"focus {focus} has none for {file}: its middle is kept", err=True)
    return rectangle


def _with_longer_sides(options: RuleArguments, e: Explanation) -> list[tuple[str, str]]:
    """What the default longest side of buckets costs, as a line; none where it costs nothing."""
    from kohya_bucket.reports.explain import explain

    longest = 2 * max(options.size)
    if options.brings_sizes or options.max_bucket_reso >= longest:
        return []
    other = explain(replace(options, max_bucket_reso=longest).make(), *e.size, e.focus)
    if other.crop_loss >= e.crop_loss - 0.01:
        return []
    then = f"with {longest}, it is {other.bucket} and loses {other.crop_loss:.1%}"
    return [("longest", f"max_bucket_reso is {options.max_bucket_reso}, sd-scripts' default; {then}")]


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
        why = scan.failures[0][2] if Path(image).exists() else f"no such file: {path_meant(image)}"
        if image.isdecimal():
            why = f"for a square, write {image}x{image}"
        raise KohyaBucketError(f"{image} is neither a size such as 576x768 nor a readable image: {why}")
    width, height = scan.sizes[0].tolist()
    return Path(image), (width, height), int(scan.orientation[0])


_IGNORED = "training ignores it and takes the pixels as stored"


def _print(name: str, e: Explanation, exif: str, foreign: str, more: Sequence[tuple[str, str]]) -> None:
    console = plain_console()

    def line(label: str, text: str) -> None:
        console.print(f"  {label:<10}{text}", soft_wrap=True)

    console.print(f"{e.size[0]}x{e.size[1]}", style="bold", end="")
    console.print(f", aspect {e.aspect:.4f}, in {name}", soft_wrap=True)
    if foreign:
        line("file", foreign)
    if exif:
        line("EXIF", exif)
    if e.bucket is None:
        line("bucket", f"none: {e.reason}")
        return
    why = "exactly the image's size" if e.exact else f"aspect {e.bucket.aspect_ratio:.4f}, {e.distance:.4f} away"
    console.print(f"  bucket    {e.bucket}", style="bold green", end="")
    console.print(f"  ({why})", soft_wrap=True)
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
    if e.focus_cut is not None:
        middle, now = e.focus_cut
        kept = "whole" if not now else f"{now:.1%} of it cut off"
        line("focus", f"{kept}; the middle would cut off {middle:.1%} of it")
    for label, text in more:
        line(label, text)


def _draw_into(target: Path, file: Path | None, explained: Sequence[Explanation], unturned: str, obey: bool) -> None:
    """Draw the first of `explained` that has a bucket, over the image or, without its file, over a grid."""
    from PIL import Image

    from kohya_bucket.images import pixels
    from kohya_bucket.reports.explain import draw_preview

    e = next((e for e in explained if e.bucket is not None), None)
    if e is None:
        raise KohyaBucketError(f"no preview: {explained[0].reason}")
    try:
        picture = Image.open(open_input(file)) if file is not None else _grid(e.size)
        turned = pixels.upright(picture) if obey else picture
        if (turned.width < turned.height) == (e.size[0] < e.size[1]):  # or else the size counts as stored
            picture = turned
        picture = draw_preview(picture, e)
    except pixels.NO_IMAGE as error:
        raise pixels.explained(str(file), error) from error
    kind = Image.registered_extensions().get(target.suffix.lower())
    try:
        if kind is None:
            raise ValueError(f"no kind of picture ends in {target.suffix!r}")
        data = saved_as(picture, kind)
    except (OSError, ValueError, KeyError) as error:
        raise KohyaBucketError(f"the preview cannot be drawn as {target}: {error}; name a .png file") from error
    replace_file(target, data)
    say(f"preview of {e.bucket}, {e.crop_loss:.1%} cut off, in {target}{unturned}", err=True)


def _grid(size: tuple[int, int]) -> Image:
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
