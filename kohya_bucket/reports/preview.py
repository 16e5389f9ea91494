"""A picture of what training sees of an image: the kept area outlined, the cut-off darkened, and both in words."""

from __future__ import annotations

from PIL import Image, ImageDraw

from kohya_bucket.reports.drawing import Text
from kohya_bucket.reports.explain import Explanation

__all__ = ["draw_preview"]

_LONGEST = 1024
_DARK = 0.35
_OUTLINE = (255, 196, 0)
_LETTERS = 11  # pixels at least


def draw_preview(image: Image.Image, explanation: Explanation) -> Image.Image:
    """Draw over a copy of `image`, scaled to at most 1024 pixels.

    Raises:
        ValueError: the image has no bucket.
    """
    if explanation.bucket is None:
        raise ValueError(f"nothing to draw: {explanation.reason}")
    width, height = explanation.resized
    factor = min(1.0, _LONGEST / max(width, height))
    shown = image.convert("RGB").resize((max(round(width * factor), 1), max(round(height * factor), 1)))
    left, top, right, bottom = explanation.cut
    x0, y0 = min(round(left * factor), shown.width - 1), min(round(top * factor), shown.height - 1)
    # Of an extreme aspect the kept part may be less than a pixel here: it is shown as one.
    box = (x0, y0, max(round((width - right) * factor), x0 + 1), max(round((height - bottom) * factor), y0 + 1))
    result = shown.point([round(value * _DARK) for value in range(256)] * 3)
    result.paste(shown.crop(box), box)
    line = max(2, round(max(shown.size) / 300))
    ImageDraw.Draw(result).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), outline=_OUTLINE, width=line)
    _write(result, f"{explanation.bucket}, {explanation.crop_loss:.1%} cut off")
    return result


def _write(picture: Image.Image, text: str) -> None:
    """At the lower left, on a dark ground; not at all where there is no room for letters that can be read."""
    size = max(_LETTERS, round(max(picture.size) / 50))
    width, height = round(0.62 * size * len(text)) + size, 2 * size
    if width > picture.width or 2 * height > picture.height:
        return
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, picture.height - height, width, picture.height), fill="#16181a")
    Text(size / 2, picture.height - height / 2, text, size, "#ffffff", "start", False, False).paint(picture, draw, 1)
