"""Boxes of detectors and of people, from the files of other programs, as one rectangle for each image.

COCO: one JSON object with `images` and `annotations`, whose `bbox` is [x, y, width, height] in pixels. Label Studio:
its JSON or JSON-MIN export, boxes in percent. YOLO: a folder of text files, one for each image, with lines of `class x
y width height` in shares, x and y of the middle. CSV: a table with a head, as Roboflow, TensorFlow and Open Images
have it, in pixels with the picture's width and height, or in shares without.
"""

from __future__ import annotations

import csv
import io
import math
import os
import posixpath
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from kohya_bucket.errors import ConfigError, as_damage
from kohya_bucket.images.listing import list_images
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.texts import counted, parse_json, read_text

_YOLO = re.compile(r"\d+ [-+.]*\d")
_UPLOADED = re.compile(r"[0-9a-f]{8}-(?=.)")  # what Label Studio puts before the names of uploaded files


class Box(NamedTuple):
    """One box.

    Attributes:
        image: path or name of its image, as the file has it; of YOLO without the ending.
        label: its class, as a text.
        sides: left, top, right, bottom in shares of the picture.
        size: (width, height) of the picture that it was drawn on; None where the file does not say.
        where: the place in the file, for messages.
    """

    image: str
    label: str
    sides: tuple[float, float, float, float]
    size: tuple[int, int] | None
    where: str


def read_boxes(source: str) -> Iterator[Box]:
    """All boxes of a COCO, Label Studio or CSV file, or of a folder of YOLO's.

    Raises:
        ConfigError: another format, or a value that is not a box, with its place.
        OSError: it cannot be read.
    """
    if os.path.isdir(source):
        yield from _yolo(source)
        return
    text = read_text(source, MAX_TABLE_BYTES)
    if source.lower().endswith(".csv"):
        yield from _csv(text, source)
        return
    try:
        data = parse_json(text)
    except ValueError as error:
        wanted = "a COCO, Label Studio or CSV file, or a folder of YOLO's text files"
        raise ConfigError(f"{source} is not JSON ({error}): give {wanted}") from None
    if isinstance(data, dict) and {"images", "annotations"} <= data.keys():
        with as_damage(f"{source} is not as COCO has it", error=ConfigError):
            yield from list(_coco(data, source))
    elif isinstance(data, list) and all(isinstance(task, dict) for task in data):
        for number, task in enumerate(data, 1):
            where = f"{source}, task {number}"
            with as_damage(f"{where} is not as Label Studio has it", error=ConfigError):
                yield from list(_label_studio(task, where))
    else:
        raise ConfigError(f"{source} is neither COCO, with images and annotations, nor an export of Label Studio")


_COLUMNS = {
    "image": ("filename", "file_name", "image", "image_path", "path", "file", "imageid", "image_id"),
    "left": ("xmin", "x1", "left", "x_min"),
    "top": ("ymin", "y1", "top", "y_min"),
    "right": ("xmax", "x2", "right", "x_max"),
    "bottom": ("ymax", "y2", "bottom", "y_max"),
}


def _csv(text: str, source: str) -> Iterator[Box]:
    rows = csv.DictReader(io.StringIO(text))
    names = {str(name).strip().lower(): name for name in rows.fieldnames or ()}
    found = {what: next((names[n] for n in spelled if n in names), None) for what, spelled in _COLUMNS.items()}
    if missing := [what for what, name in found.items() if name is None]:
        have = ", ".join(names) or "none"
        raise ConfigError(f"{source} has no column for {', '.join(missing)} (its columns: {have}): name them filename, "
                          "xmin, ymin, xmax, ymax, and width and height if they are pixels")  # fmt: skip
    label = next((names[n] for n in ("class", "label", "labelname", "class_name") if n in names), None)
    in_pixels = {"width", "height"} <= names.keys()
    for row in rows:
        where = f"{source}, line {rows.line_num}"
        sides = _numbers([row[found[one]] for one in ("left", "top", "right", "bottom")], 4, f"{where}: the box")
        across, down = 1.0, 1.0
        if in_pixels:
            across, down = _numbers([row[names["width"]], row[names["height"]]], 2, f"{where}: the image's size")
            if min(across, down) < 1:
                raise ConfigError(f"{where}: the image's width and height are {across:g} and {down:g}")
        elif max(sides) > 1:
            raise ConfigError(
                f"{where}: {max(sides):g} is not a share of a picture, and a box in pixels needs the picture's size: "
                "add the columns width and height"
            )
        left, top, right, bottom = sides
        shares = left / across, top / down, right / across, bottom / down
        known = (int(across), int(down)) if in_pixels else None
        yield Box(str(row[found["image"]]), "" if label is None else str(row[label]), shares, known, where)


def _coco(data: dict[str, Any], source: str) -> Iterator[Box]:
    names = {one.get("id"): str(one.get("name")) for one in data.get("categories") or () if isinstance(one, dict)}
    images = {one.get("id"): one for one in data["images"] if isinstance(one, dict)}
    for number, one in enumerate(data["annotations"], 1):
        where = f"{source}, annotation {number}"
        image = images.get(one.get("image_id")) if isinstance(one, dict) else None
        if image is None:
            raise ConfigError(f"{where}: {str(one)[:100]} belongs to no image in the file")
        x, y, width, height = _numbers(one.get("bbox"), 4, f"{where}: bbox")
        across, down = _numbers([image.get("width"), image.get("height")], 2, f"{where}: the image's width and height")
        if min(across, down) < 1:
            raise ConfigError(f"{where}: the image's width and height are {across:g} and {down:g}")
        sides = x / across, y / down, (x + width) / across, (y + height) / down
        label = names.get(one.get("category_id"), str(one.get("category_id")))
        yield Box(str(image.get("file_name")), label, sides, (int(across), int(down)), where)


def _label_studio(task: dict[str, Any], where: str) -> Iterator[Box]:
    data = task.get("data", task)
    image = next((v for v in data.values() if isinstance(v, str) and _looks_like_path(v)), None)
    results = [r for a in task.get("annotations") or () if not a.get("was_cancelled") for r in a.get("result") or ()]
    simple = [one for value in task.values() if isinstance(value, list) for one in value if isinstance(one, dict)]
    regions = [{**r, **r["value"]} for r in results if isinstance(r, dict) and isinstance(r.get("value"), dict)]
    for region in regions or [one for one in simple if "x" in one]:
        if not {"x", "y", "width", "height"} <= region.keys():
            continue  # not a box: a choice, a text, a polygon
        if image is None:
            raise ConfigError(f"{where}: has boxes, and names no image")
        x, y, width, height = _numbers([region[k] for k in ("x", "y", "width", "height")], 4, f"{where}: a box")
        if region.get("rotation"):
            x, y, width, height = _around_turned(x, y, width, height, region)
        labels = next((v for k, v in region.items() if k.endswith("labels") and isinstance(v, list) and v), [""])
        across, down = region.get("original_width"), region.get("original_height")
        known = (across, down) if isinstance(across, int) and isinstance(down, int) else None
        sides = x / 100, y / 100, (x + width) / 100, (y + height) / 100
        yield Box(_file_of(image), str(labels[0]), sides, known, where)


def _around_turned(
    x: float, y: float, width: float, height: float, region: dict[str, Any]
) -> tuple[float, float, float, float]:
    """The upright box around one that is turned by `rotation` degrees about its upper left corner, in percent."""
    across, down = float(region.get("original_width") or 100), float(region.get("original_height") or 100)
    angle = math.radians(float(region["rotation"]))
    corners = [(a * width * across, b * height * down) for a in (0, 1) for b in (0, 1)]
    xs = [x + (a * math.cos(angle) - b * math.sin(angle)) / across for a, b in corners]
    ys = [y + (a * math.sin(angle) + b * math.cos(angle)) / down for a, b in corners]
    return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)


def _looks_like_path(text: str) -> bool:
    return bool(re.search(r"\.\w{2,5}$", urlsplit(text).path)) or "?d=" in text


def _file_of(address: str) -> str:
    """The path or name of the file behind an address of Label Studio."""
    parts = urlsplit(address)
    local = parse_qs(parts.query).get("d")
    if local:
        return local[0]
    if "/upload/" in parts.path:
        return _UPLOADED.sub("", unquote(posixpath.basename(parts.path)), count=1)
    return unquote(parts.path) if parts.scheme and len(parts.scheme) > 1 else address


def _yolo(folder: str) -> Iterator[Box]:
    found = False
    for path in list_images(folder, extensions=[".txt"]):
        lines = {f"{path}, line {k}": line.split() for k, line in enumerate(read_text(path).split("\n"), 1)}
        lines = {where: words for where, words in lines.items() if words}
        if not _YOLO.match(" ".join(next(iter(lines.values()), ()))):
            continue  # a caption, or a list of classes
        for where, words in lines.items():
            if len(words) not in (5, 6):  # the sixth is how sure a detector was
                raise ConfigError(
                    f"{where}: has {counted(len(words), 'value')}, but a box is: class x y width height; export "
                    "boxes, not outlines or key points"
                )
            x, y, width, height = _numbers(words[1:5], 4, f"{where}: the box")
            sides = x - width / 2, y - height / 2, x + width / 2, y + height / 2
            found = True
            yield Box(os.path.splitext(os.path.relpath(path, folder))[0], words[0], sides, None, where)
    if not found:
        raise ConfigError(f"{folder}: no text file in it has boxes, which are lines of: class x y width height")


def _numbers(values: Any, count: int, what: str) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{what} is {str(values)[:100]}, but must be {count} finite numbers")
    return numbers
