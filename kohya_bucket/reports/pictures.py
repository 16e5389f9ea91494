"""Small pictures of images, and examples of what each bucket cuts off."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features

from kohya_bucket.images.formats import is_video
from kohya_bucket.images.parallel import Progress, for_each
from kohya_bucket.images.pixels import NO_IMAGE, decode_all, upright
from kohya_bucket.inputs import open_input
from kohya_bucket.reports.analysis import Analysis

_WORST_FOCUS = 20


def shots(analysis: Analysis, images: Sequence[int], pictures: Pictures) -> list[dict[str, Any]]:
    """Small pictures; the kept area and the focus as shares of the image: left, top, width, height."""
    shots = []
    for i in images:
        resized, bucket = analysis.placement.resized_sizes[i], analysis.placement.bucket_sizes[i]
        left_top = analysis.placement.select(np.array([i])).cuts[0, :2]
        shot = {
            "row": image_row(analysis, i, ""),
            "picture": pictures[analysis.images.paths[i]],
            "kept": [*(left_top / resized).round(4).tolist(), *(bucket / resized).round(4).tolist()],
            "caption": caption_beside(analysis.images.paths[i], analysis.images.captions),
        }
        focus = analysis.subject.focus
        if focus is not None and not np.isnan(focus[i]).any():
            shot["focus"] = [*focus[i, :2].round(4).tolist(), *(focus[i, 2:] - focus[i, :2]).round(4).tolist()]
        shots.append(shot)
    return shots


_AREA = 120 * 120
_LONGEST = 200
_BACKGROUND = (128, 128, 128)
_THREADS = 4
Pictures = dict[str, tuple[str, int, int] | None]
"""By path: (data URI, width, height), or None where there is no picture of it."""


def illustrate(
    analyses: Sequence[Analysis], thumbnails: int, progress: Progress | None = None
) -> tuple[list[Analysis], Pictures]:
    """Small pictures of the examples of all buckets; images that prove to be broken count as such from there on.

    Args:
        thumbnails: as `render_page` says.

    Returns:
        the analyses, without the images whose pixels cannot be decoded; the pictures.
    """
    out, pictures = list(analyses), Pictures()
    while True:
        shown = [(a, [*(some for _, some in examples), worst]) for a, examples, worst in shown_images(out, thumbnails)]
        turns = {a.images.paths[i]: a.images.upright for a, chosen in shown for some in chosen for i in some}
        new = [path for path in turns if path not in pictures]
        if not new:
            return out, pictures
        turned = {path for path in new if turns[path]}
        pictures |= zip(new, make_thumbnails(new, progress, turned), strict=True)
        files = [path for path in new if pictures[path] is None and not is_video(path) and Path(path).is_file()]
        if broken := decode_all(files).broken:
            out = [a.without(broken) for a in out]


def shown_images(
    analyses: Sequence[Analysis], thumbnails: int
) -> list[tuple[Analysis, list[tuple[int, list[int]]], list[int]]]:
    """Of each analysis the examples of its buckets, and the images whose focus would be cut most."""
    share, worst = max(0, thumbnails) // max(len(analyses), 1), max(0, min(_WORST_FOCUS, thumbnails))
    return [(a, choose_examples(a, share), a.worst_focus[:worst].tolist()) for a in analyses]


def choose_examples(analysis: Analysis, total: int) -> list[tuple[int, list[int]]]:
    """Which images stand for each bucket: (bucket index, image indices), `total` images at most.

    The fullest buckets first. Within a bucket: the image that loses most, then others spread evenly over the
    losses down to the one that loses least; among three or more the one that is enlarged most.
    """
    used = sorted((i for i, b in enumerate(analysis.buckets) if b.images), key=lambda i: -analysis.buckets[i].images)
    if not used or total < 1:
        return []
    each = int(np.clip(total // len(used), 3, 12))
    loss, index = analysis.placement.crop_loss, analysis.placement.bucket_index
    order = np.lexsort((-loss, index))
    starts = np.searchsorted(index[order], np.arange(len(analysis.buckets) + 1))
    out = []
    for k in used:
        share = min(each, total)
        if share < 1:
            break
        images = order[starts[k] : starts[k + 1]]
        chosen = np.unique(np.linspace(0, len(images) - 1, min(share, len(images))).round().astype(int))
        largest = int(analysis.scale[images].argmax())
        if len(chosen) > 2 and largest not in chosen:
            chosen[len(chosen) // 2] = largest
            chosen.sort()
        out.append((k, images[chosen].tolist()))
        total -= len(chosen)
    return out


def make_thumbnails(
    paths: Sequence[str], progress: Progress | None = None, turned: Collection[str] = ()
) -> list[tuple[str, int, int] | None]:
    """(data URI, width, height) of each image, those in `turned` as EXIF asks; None where its pixels do not decode."""
    kind = "WEBP" if features.check("webp") else "JPEG"
    return for_each(partial(_thumbnail, kind, turned), paths, progress=progress, at_once=_THREADS)


def _thumbnail(kind: str, turned: Collection[str], path: str) -> tuple[str, int, int] | None:
    try:
        with open_input(path) as file, Image.open(file) as image:
            scale = min(1.0, (_AREA / (image.width * image.height)) ** 0.5, _LONGEST / max(image.size))
            size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
            image.draft("RGB", (2 * size[0], 2 * size[1]))
            as_seen = upright(image) if path in turned else image
            size = size if as_seen.size == image.size else size[::-1]
            return _encode(as_seen, size, kind), *size
    except (*NO_IMAGE, MemoryError):
        return None


def _encode(image: Image.Image, size: tuple[int, int], kind: str) -> str:
    if image.mode in ("P", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
    elif image.mode.startswith("I;16") or image.mode in ("I", "F"):
        levels = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((levels / max(float(levels.max()), 1.0) * 255).clip(0, 255).astype(np.uint8))
    small = image.resize(size, Image.Resampling.BOX, reducing_gap=2.0)
    if small.mode == "RGBA":
        flat = Image.new("RGB", size, _BACKGROUND)
        flat.paste(small, mask=small.getchannel("A"))
        small = flat
    buffer = io.BytesIO()
    small.convert("RGB").save(buffer, kind, quality=55)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def caption_beside(path: str, endings: Sequence[str], longest: int = 300) -> str | None:
    """The start of the caption file beside an image; None where there is none."""
    for ending in endings:
        try:
            with open_input(Path(path).with_suffix(ending)) as file:
                text = file.read(4 * (longest + 1)).decode("utf-8", "replace")[: longest + 1].strip()
        except (OSError, ValueError):
            continue
        return text if len(text) <= longest else text[:longest] + "…"
    return None


def image_row(analysis: Analysis, i: int, note: str) -> list[Any]:
    """[name, width, height, bucket index, crop loss, scale, note]; -1 where there is no bucket."""
    width, height = analysis.images.sizes[i].tolist()
    k = int(analysis.placement.bucket_index[i])
    if k < 0:
        return [analysis.images.short_name(i), width, height, -1, -1, -1, note]
    loss, scale = float(analysis.placement.crop_loss[i]), float(analysis.scale[i])
    return [analysis.images.short_name(i), width, height, k, round(loss, 5), round(scale, 4), note]
