"""A picture of what training sees of an image: the kept area outlined, the cut-off darkened."""

from __future__ import annotations

from PIL import Image, ImageDraw

from kohya_bucket.reports.explain import Explanation

__all__ = ["draw_preview"]

_LONGEST = 1024
_DARK = 0.35
_OUTLINE = (255, 196, 0)


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
    return result
