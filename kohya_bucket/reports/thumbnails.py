"""A bounded number of small pictures, for contact sheets."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, features

from kohya_bucket.images.parallel import Progress, for_each
from kohya_bucket.reports.analysis import Analysis

__all__ = ["caption_beside", "choose_examples", "data_uri", "make_thumbnails"]

_AREA = 120 * 120
_LONGEST = 200
_BACKGROUND = (128, 128, 128)
_THREADS = 4


def choose_examples(analysis: Analysis, total: int) -> list[tuple[int, list[int]]]:
    """Which images stand for each bucket: (bucket index, image indices), `total` images at most.

    The fullest buckets first. Within a bucket: the image that loses most, then others spread evenly over the
    losses down to the one that loses least.
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
        mine = order[starts[k] : starts[k + 1]]
        chosen = mine[np.unique(np.linspace(0, len(mine) - 1, min(share, len(mine))).round().astype(int))]
        out.append((k, chosen.tolist()))
        total -= len(chosen)
    return out


def make_thumbnails(paths: Sequence[str], progress: Progress | None = None) -> list[tuple[str, int, int] | None]:
    """(data URI, width, height) of each image, unrotated; None where its pixels do not decode."""
    kind = "WEBP" if features.check("webp") else "JPEG"
    return for_each(partial(_thumbnail, kind), paths, progress=progress, at_once=_THREADS)


def _thumbnail(kind: str, path: str) -> tuple[str, int, int] | None:
    try:
        with Image.open(path) as image:
            scale = min(1.0, (_AREA / (image.width * image.height)) ** 0.5, _LONGEST / max(image.size))
            size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
            image.draft("RGB", (2 * size[0], 2 * size[1]))
            return (*_encode(image, size, kind), *size)
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError):
        return None


def _encode(image: Image.Image, size: tuple[int, int], kind: str) -> tuple[str]:
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
    return (data_uri(buffer.getvalue(), kind),)


def data_uri(content: bytes, kind: str) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode('ascii')}"


def caption_beside(path: str, endings: Sequence[str], longest: int = 300) -> str | None:
    """The start of the caption file beside an image; None where there is none."""
    for ending in endings:
        try:
            with open(Path(path).with_suffix(ending), encoding="utf-8", errors="replace") as file:
                text = file.read(longest + 1).strip()
        except (OSError, ValueError):
            continue
        return text if len(text) <= longest else text[:longest] + "…"
    return None
