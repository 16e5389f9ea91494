"""Why one image lands in its bucket, and a picture of what training sees of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kohya_bucket.buckets import Bucket, BucketRule
from kohya_bucket.buckets.focus import cut_rectangles, focus_pixels, focused, middle_cuts
from kohya_bucket.buckets.switching import switching_points

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Neighbour:
    """A bucket next to the image's, in order of aspect.

    Attributes:
        distance: |bucket aspect - image aspect|.
        switch: image aspect (width / height) at which the two hand over, or None.
        crop_loss: what this bucket would crop off.
    """

    bucket: Bucket
    distance: float
    switch: float | None
    crop_loss: float


@dataclass(frozen=True)
class Explanation:
    """What happens to one image. Sizes are (width, height) in pixels; `cut` is left, top, right, bottom.

    `bucket` is None where there is none, and `reason` says why. `neighbours` are the next narrower and the next
    wider bucket; empty where buckets follow from the images. Of an image with a focus, `focus` is its rectangle in
    shares, and `focus_cut` are the shares of it that the middle crop would cut off, and that this crop does.
    """

    size: tuple[int, int]
    bucket: Bucket | None
    reason: str
    resized: tuple[int, ...] = (0, 0)
    cut: tuple[int, ...] = (0, 0, 0, 0)
    crop_loss: float = 0.0
    scale: float = 0.0
    distance: float = 0.0
    exact: bool = False
    neighbours: tuple[Neighbour, ...] = ()
    focus: tuple[float, ...] | None = None
    focus_cut: tuple[float, float] | None = None

    @property
    def aspect(self) -> float:
        """Width / height of the image."""
        return self.size[0] / self.size[1]


def explain(rule: BucketRule, width: int, height: int, focus: tuple[float, ...] | None = None) -> Explanation:
    """Place one image and look around its bucket; with a focus, its crop keeps that.

    Raises:
        ValueError: a side below 1.
    """
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} is not an image size: both sides must be 1 or more")
    rectangle = None if focus is None else np.array([focus])
    placement = focused(rule.place([(width, height)]), rectangle)
    bucket = placement.bucket(0)
    if bucket is None:
        return Explanation((width, height), None, placement.reason(0).text)
    resized = tuple(placement.resized_sizes[0].tolist())
    lost = None
    if rectangle is not None:
        lost = float(middle_cuts(placement, rectangle)[0]), float(cut_rectangles(placement, rectangle)[0])
    return Explanation(
        size=(width, height),
        bucket=bucket,
        reason="",
        resized=resized,
        cut=tuple(placement.cuts[0].tolist()),
        crop_loss=float(placement.crop_loss[0]),
        scale=resized[0] / width,
        distance=abs(float(placement.aspect_errors[0])),
        exact=bucket.as_tuple() == (width, height),
        neighbours=_neighbours(rule, bucket, width / height),
        focus=focus,
        focus_cut=lost,
    )


def _neighbours(rule: BucketRule, bucket: Bucket, aspect: float) -> tuple[Neighbour, ...]:
    bucket_set = rule.bucket_set
    if bucket_set is None or bucket not in bucket_set:
        return ()
    points = switching_points(bucket_set, getattr(rule, "switching", "midpoint"))
    switches = {frozenset((p.narrower, p.wider)): p.aspect for p in points}
    order = sorted(bucket_set, key=lambda b: (b.aspect_ratio, b.pixel_count))
    at = order.index(bucket)
    neighbours = []
    for other in order[max(at - 1, 0) : at] + order[at + 1 : at + 2]:
        loss = 1 - min(other.aspect_ratio / aspect, aspect / other.aspect_ratio)
        distance = float(np.abs(other.aspect_ratio - aspect))
        neighbours.append(Neighbour(other, distance, switches.get(frozenset((bucket, other))), loss))
    return tuple(neighbours)


_LONGEST = 1024
_DARK = 0.35
_OUTLINE, _FOCUS = (255, 196, 0), (0, 196, 255)
_LETTERS = 11  # pixels at least


def draw_preview(image: Image.Image, explanation: Explanation) -> Image.Image:
    """Draw over a copy of `image`, scaled to at most 1024 pixels.

    Raises:
        ValueError: the image has no bucket.
    """
    from PIL import ImageDraw

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
    if explanation.focus is not None:
        sides = focus_pixels(np.array([explanation.focus]), np.array([shown.size]))[0].tolist()
        ImageDraw.Draw(result).rectangle((sides[0], sides[1], sides[2] - 1, sides[3] - 1), outline=_FOCUS, width=line)
    _write(result, f"{explanation.bucket}, {explanation.crop_loss:.1%} cut off")
    return result


def _write(picture: Image.Image, text: str) -> None:
    """At the lower left, on a dark ground; not at all where there is no room for letters that can be read."""
    from PIL import ImageDraw

    size = max(_LETTERS, round(max(picture.size) / 50))
    width, height = round(0.62 * size * len(text)) + size, 2 * size
    if width > picture.width or 2 * height > picture.height:
        return
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, picture.height - height, width, picture.height), fill="#16181a")
    draw.text((size / 2, picture.height - height + size / 3), text, fill="#ffffff", font=_font(size))


def _font(size: int) -> Any:
    from PIL import ImageFont

    for name in ("DejaVuSans.ttf", "Verdana.ttf", "Arial.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except (OSError, ImportError):  # no such font, or a Pillow without FreeType
            continue
    return ImageFont.load_default()
