"""`kohya-bucket focus import`: what other programs marked in images, as the file that `[kohya_bucket] focus` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.console import say, scan_progress
from kohya_bucket.cli.help import opt
from kohya_bucket.cli.options import Quiet, check_output
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file
from kohya_bucket.texts import counted, some

if TYPE_CHECKING:
    from kohya_bucket.images.focus_import import Box
    from kohya_bucket.images.sizes import SizeScan

_ROUNDED = 100  # sides that differ by less than one part of so many have been rounded
SUBCOMMANDS = ("import_",)


def import_(
    source: Annotated[str, typer.Argument(help="A COCO, Label Studio or CSV file, or a folder of YOLO's text files.")],
    images: Annotated[str, typer.Option(help="The folder that the images' names start from.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON Lines file to write.")],
    label: list[str] | None = opt(None, "Take boxes of this class only; of YOLO its number. Can be repeated."),
    upright: bool = opt(False, "The boxes were drawn on images turned as their EXIF asks.", "--upright"),
    quiet: Quiet = False,
) -> None:
    """Each image gets the smallest rectangle around its boxes. No detector comes with this package."""
    from kohya_bucket.images import list_images, read_sizes
    from kohya_bucket.images.focus_files import focus_lines
    from kohya_bucket.images.focus_import import read_boxes

    check_output("--output", output, "a JSON Lines file", [source], lambda _: False)
    boxes = list(read_boxes(source))
    wanted = [box for box in boxes if not label or box.label in label]
    if not wanted:
        labels = some(sorted({box.label for box in boxes}), 10)
        raise KohyaBucketError(f"{source}: no box{f' of {some(label)}; its classes: {labels}' if label else ''}")
    files = _files(list_images(images), images)
    named = [(box, files.get(_key(box.image)) or files.get(_key(Path(box.image).name))) for box in wanted]
    there = [(box, path) for box, path in named if path is not None]
    if not there:
        raise KohyaBucketError(
            f"{images} holds none of the images of {source}, such as {wanted[0].image}: correct --images"
        )
    paths = list(dict.fromkeys(path for _, path in there))
    with scan_progress("reading headers", quiet=quiet) as progress:
        scan = read_sizes(paths, progress=progress)
    rows = _rectangles(there, scan, upright=upright)
    replace_file(output, focus_lines((_relative(path, output), box) for path, box in rows).encode("utf-8"))
    say(f"{output}: {counted(len(rows), 'image')}, {counted(len(there), 'box')}")
    missing = list(dict.fromkeys(box.image for box, path in named if path is None))
    if missing:
        say(f"{counted(len(missing), 'image', 'is', 'are')} not in {images}: {some(missing)}", err=True)


def _files(paths: list[str], folder: str) -> dict[str, str | None]:
    """Images by their path in the folder, with and without the ending, and by name where only one has it."""
    found: dict[str, str | None] = {}
    for path in map(Path, paths):
        for name in dict.fromkeys((path.name, path.stem)):
            found[_key(name)] = str(path) if _key(name) not in found else None
    for path in map(Path, paths):
        inside = Path(os.path.relpath(path, folder))
        found |= dict.fromkeys(map(_key, (str(inside.with_suffix("")), str(inside), str(path.absolute()))), str(path))
    return found


def _key(name: str) -> str:
    return os.path.normcase(os.path.normpath(name))


def _relative(path: str, output: Path) -> str:
    try:
        return Path(os.path.relpath(path, output.absolute().parent)).as_posix()
    except ValueError:  # on another drive
        return Path(path).absolute().as_posix()


def _rectangles(found: list[tuple[Box, str]], scan: SizeScan, *, upright: bool) -> list[tuple[str, tuple[float, ...]]]:
    """(path, rectangle around its boxes, in the image as it is stored)."""
    import numpy as np

    from kohya_bucket.buckets.focus import upright_to_stored
    from kohya_bucket.images.focus_files import around

    row_of = {path: i for i, path in enumerate(scan.paths)}
    boxes: dict[str, list[tuple[float, ...]]] = {}
    for box, path in found:
        i = row_of[path]
        if not scan.readable[i]:
            raise KohyaBucketError(f"{path} cannot be read as an image, and {box.where} is of it: repair or remove it")
        turns, stored = int(scan.orientation[i]), scan.sizes[i].tolist()
        turn = turns if upright else 1
        width, height = stored[::-1] if turn >= 5 else stored
        drawn_on = box.size or (width, height)
        # of a picture of another aspect
        if abs(drawn_on[0] * height - drawn_on[1] * width) * _ROUNDED > drawn_on[0] * height:
            remedy = ": add --upright, if they were drawn on the image turned as its EXIF asks" if turns >= 5 else ""
            what = f"its boxes are of a picture of {drawn_on[0]}x{drawn_on[1]}"
            raise KohyaBucketError(f"{box.where}: {what}, but {path} is {width}x{height}{remedy}")
        left, top, right, bottom = (min(max(side, 0.0), 1.0) for side in box.sides)
        if left >= right or top >= bottom:
            raise KohyaBucketError(f"{box.where}: the box {[round(s, 4) for s in box.sides]} (shares) is empty or lies "
                                   f"outside of {path}")  # fmt: skip
        sides = upright_to_stored(np.array([(left, top, right, bottom)]), np.array([turn]))[0].tolist()
        boxes.setdefault(path, []).append(tuple(sides))
    return [(path, tuple(round(side, 9) for side in around(some))) for path, some in boxes.items()]
