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
from kohya_bucket.cli.configs import adapter_options, given_config, musubi_config, rules_of_config
from kohya_bucket.cli.console import plain_console, say
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
from kohya_bucket.reports.trainers import AI_TOOLKIT, MUSUBI_TUNER, release_at_hand, trainer_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from kohya_bucket.cli.clips import WayToTrain
    from kohya_bucket.reports.explain import Explanation


_SIZE = re.compile(r"(\d+)\s*[xX×*,]\s*(\d+)")
OPTION_GROUPS = {"simulate": {"without": ("num_buckets",)}}


def simulate(
    context: typer.Context,
    image: Annotated[str, typer.Argument(help="a size such as 576x768, an image; 1280x720x81 or a clip")],
    *,
    config: Annotated[Path | None, typer.Option(help="take the rules of this dataset config")] = None,
    clip_options: ClipOptions,
    focus: Annotated[
        str | None, typer.Option(help="keep this rectangle: left,top,right,bottom in shares of the picture; or a file")
    ] = None,
    preview: Annotated[Path | None, typer.Option(help="draw the kept area into this picture")] = None,
    as_json: AsJson = False,
    options: RuleArguments,
) -> None:
    from kohya_bucket.images.headers import ORIENTATIONS
    from kohya_bucket.reports.explain import explain

    config, options, _ = given_config(config, options)
    if config is not None:
        refuse_beside(context, f"--config {config} brings its own rules", options.fields)
    arch, clip_options = clip_options.family()
    options = options.for_arch(context, arch)
    clip, foreign, whose = None, "", trainer_of(config)
    for_clips = clip_options != ClipOptions() or whose == MUSUBI_TUNER
    if Path(image).is_dir() and not for_clips:
        raise KohyaBucketError(
            f"{image} is a folder, and one image is simulated: name one in it, or `kohya-bucket analyze "
            f"{argument(image)}` for all; if its images are the frames of a clip, add --arch wan or --target-frames"
        )
    if is_clip := bool(CLIP_SIZE.fullmatch(image.strip())) or is_video(image) or Path(image).is_dir():
        from kohya_bucket.cli.clips import clip_of

        (file, clip), orientation = clip_of(image), 1
        size = clip.size
    else:
        file, size, orientation = _size_of(image)
        if file is not None:
            from kohya_bucket.cli.sources import not_read

            foreign = not_read([image]).get(image, "")
    check_output("--preview", preview, "a picture", [file, config])
    ways: list[tuple[WayToTrain, tuple[int, int]]]
    if is_clip or for_clips:
        from kohya_bucket.cli.clips import ways_to_train

        ways = [(way, size) for way in ways_to_train(context, config, options, clip_options, clip)]
    elif config is not None:
        ways = [((name, rule, None), its) for name, rule, its in rules_of_config(config, file, size, orientation)]
    else:
        ways = [((options.title, options.make(), None), size)]
    kept = _focus_of(focus, config, clip_options.arch, file)
    found = [(name, explain(rule, *its, kept), taken) for (name, rule, taken), its in ways]
    asked, obeyed = ORIENTATIONS.get(orientation, ""), whose == AI_TOOLKIT
    if as_json:
        rows = [
            {"settings": name, **asdict(e), "aspect": e.aspect, "exif_orientation": orientation}
            | ({"clip": taken.told} if taken else {})
            | {"not_read": foreign}
            for name, e, taken in found
        ]
        typer.echo(json.dumps(rows, indent=2, default=lambda bucket: {"width": bucket.width, "height": bucket.height}))
    else:
        for name, explanation, taken in found:
            more = taken.lines() if taken else []
            if config is None and not given(context, ["max_bucket_reso"]):
                more = [*more, *_with_longer_sides(options, explanation)]
            _print(name, explanation, asked and f"asks for: {asked}; {_EXIF[obeyed]}", foreign, more)
    if preview is not None:
        still = None if is_clip else file  # of a clip, a grid stands for its frames
        unturned = f", as stored, without what EXIF asks for ({asked})" if asked and not obeyed else ""
        _draw_into(preview, still, [explanation for _, explanation, _ in found], unturned, obeyed)
    if all(e.bucket is None or (taken and not taken.told["items"]) for _, e, taken in found):
        raise typer.Exit(1)


def _focus_of(given: str | None, config: Path | None, arch: str | None, file: Path | None) -> tuple[float, ...] | None:
    """The rectangle that `--focus` gives, or that a file has for the image, None where there is none.

    Of a `config` its own counts where none is given; what training would not keep is refused.
    """
    from kohya_bucket.images.focus_files import focus_in, parsed_focus
    from kohya_bucket.trainers.door.options import AdapterOptions

    def asked(options: AdapterOptions) -> AdapterOptions:
        return options if given is None else options.over(focus=given)

    if config is None:
        options = asked(AdapterOptions())
    elif (whose := trainer_of(config)) == AI_TOOLKIT:
        if given is not None:
            raise KohyaBucketError(f"{config} is a job of ai-toolkit, which cuts in the middle: leave out --focus")
        return None
    elif whose == MUSUBI_TUNER:
        from kohya_bucket.trainers.musubi.config import check_options

        of_musubi = musubi_config(config, arch)
        options = asked(adapter_options(of_musubi))
        check_options(options)
    else:
        from kohya_bucket.trainers.sdscripts.config import read_config
        from kohya_bucket.trainers.sdscripts.config.model import refuse_lost_focus

        read = read_config(config, release=release_at_hand(None)[0], check_captions=False)
        options = asked(adapter_options(read))
        for dataset in read.datasets:
            refuse_lost_focus(dataset.config, options, read.release)
    if options.focus is None:
        return None
    rectangle = parsed_focus(options.focus, "--focus")
    if rectangle is None and file is None and given is not None:
        raise KohyaBucketError(
            f"--focus is {given!r}, but a size has no name to look for in a file: give left,top,right,bottom"
        )
    return rectangle or (None if file is None else focus_in(options.focus, str(file)))


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


_EXIF = {False: "training ignores it and takes the pixels as stored", True: "ai-toolkit turns the pixels accordingly"}


def _print(name: str, e: Explanation, exif: str, foreign: str, more: Sequence[tuple[str, str]]) -> None:
    console = plain_console()

    def line(label: str, text: str) -> None:
        console.print(f"  {label:<10}{text}", soft_wrap=True)

    console.print(f"[bold]{e.size[0]}x{e.size[1]}[/bold], aspect {e.aspect:.4f}, in {name}")
    if foreign:
        line("file", foreign)
    if exif:
        line("EXIF", exif)
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
    if e.focus_cut is not None:
        middle, now = e.focus_cut
        kept = "whole" if not now else f"{now:.1%} of it cut off"
        line("focus", f"{kept}; the middle would cut off {middle:.1%} of it")
    for label, text in more:
        line(label, text)


def _draw_into(target: Path, file: Path | None, found: Sequence[Explanation], unturned: str, obey_exif: bool) -> None:
    """Draw the first of `found` that has a bucket, over the image or, without its file, over a grid."""
    from PIL import Image

    from kohya_bucket.images.pixels import upright
    from kohya_bucket.reports.explain import draw_preview

    e = next((e for e in found if e.bucket is not None), None)
    if e is None:
        raise KohyaBucketError(f"no preview: {found[0].reason}")
    try:
        picture = Image.open(open_input(file)) if file is not None else _grid(e.size)
        turned = upright(picture) if obey_exif else picture
        if (turned.width < turned.height) == (e.size[0] < e.size[1]):  # or else the size counts as stored
            picture = turned
        picture = draw_preview(picture, e)
    except OSError as error:
        raise KohyaBucketError(f"{file} cannot be decoded: {error}") from error
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
