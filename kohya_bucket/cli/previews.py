"""The picture of what is kept of one image."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.cli.console import say
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from kohya_bucket.reports.explain import Explanation

__all__ = ["draw_into"]


def draw_into(target: Path, file: Path | None, found: Sequence[Explanation], orientation: int = 1) -> None:
    """Draw the first of `found` that has a bucket, over the image or, without its file, over a grid.

    The image is drawn as stored, as training takes it; what its EXIF `orientation` asks for is said.

    Raises:
        KohyaBucketError: none has a bucket, the image cannot be decoded, or the picture not be written.
    """
    from PIL import Image

    from kohya_bucket.images.headers import ORIENTATIONS
    from kohya_bucket.reports.preview import draw_preview

    placed = [explanation for explanation in found if explanation.bucket is not None]
    if not placed:
        raise KohyaBucketError(f"no preview: {found[0].reason}")
    try:
        image = Image.open(file) if file is not None else _grid(placed[0].size)
        picture = draw_preview(image, placed[0])
    except OSError as error:
        raise KohyaBucketError(f"{file} cannot be decoded: {error}") from error
    kind, buffer = Image.registered_extensions().get(target.suffix.lower()), io.BytesIO()
    try:
        if kind is None:
            raise ValueError(f"no kind of picture ends in {target.suffix!r}")
        picture.save(buffer, kind)
    except (OSError, ValueError, KeyError) as error:
        raise KohyaBucketError(f"the preview cannot be drawn as {target}: {error}; name a .png file") from error
    replace_file(target, buffer.getvalue())
    asked = ORIENTATIONS.get(orientation)
    unturned = f", as stored, without what EXIF asks for ({asked})" if asked else ""
    say(f"preview of {placed[0].bucket}, {placed[0].crop_loss:.1%} cut off, in {target}{unturned}", err=True)


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
