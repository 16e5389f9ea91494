"""Small drawings as SVG or PNG: lines, boxes, dots and texts on a white sheet.

The same shapes become both formats, SVG by hand and PNG by Pillow, so a chart needs no plotting library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from PIL import Image, ImageDraw, ImageFont

__all__ = ["Drawing"]

_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
# PNGs are drawn larger and scaled down, which smooths lines.
_OVERSAMPLING = 2


@dataclass
class Drawing:
    """Shapes in pixels, the origin at the upper left, painted in the order they were added."""

    width: int
    height: int
    title: str = ""
    shapes: list[tuple[Any, ...]] = field(default_factory=list)

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1.0) -> None:
        """A line through two or more points."""
        self.shapes.append(("line", points, colour, width))

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle; (x, y) is its upper left corner."""
        self.shapes.append(("box", x, y, width, height, colour))

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """A filled circle."""
        self.shapes.append(("dot", x, y, radius, colour))

    def text(
        self, x: float, y: float, text: str, size: int = 12, colour: str = "#222222", anchor: str = "start",
        upright: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """A text whose middle line is at y; `anchor` is start, middle or end. `upright` turns it to be read upwards;
        it then starts, ends or is centred at y along the page's height, and its middle line is at x."""
        self.shapes.append(("text", x, y, text, size, colour, anchor, upright, bold))

    def to_svg(self) -> str:
        """The drawing as an SVG document."""
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{_FONT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
        ]
        out += [_svg(shape) for shape in self.shapes]
        return "\n".join([*out, "</svg>", ""])

    def to_image(self, scale: int = 1) -> Image.Image:
        """The drawing as an RGB picture, `scale` times as large."""
        factor = scale * _OVERSAMPLING
        image = Image.new("RGB", (self.width * factor, self.height * factor), "#ffffff")
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            _paint(image, draw, shape, factor)
        return image.resize((self.width * scale, self.height * scale), Image.Resampling.LANCZOS)


def _svg(shape: tuple[Any, ...]) -> str:
    kind = shape[0]
    if kind == "line":
        _, points, colour, width = shape
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
    if kind == "box":
        _, x, y, width, height, colour = shape
        return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    if kind == "dot":
        _, x, y, radius, colour = shape
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>'
    _, x, y, text, size, colour, anchor, upright, bold = shape
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
    weight = ' font-weight="bold"' if bold else ""
    # A third of the size below the middle line is where the baseline of these fonts lies.
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" dy="0.35em" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
        f"{weight}{turn}>{escape(text)}</text>"
    )


def _paint(image: Image.Image, draw: ImageDraw.ImageDraw, shape: tuple[Any, ...], factor: int) -> None:
    kind = shape[0]
    if kind == "line":
        _, points, colour, width = shape
        scaled = [(x * factor, y * factor) for x, y in points]
        draw.line(scaled, fill=colour, width=max(1, round(width * factor)), joint="curve")
    elif kind == "box":
        _, x, y, width, height, colour = shape
        if width * factor >= 1 and height * factor >= 1:
            draw.rectangle((x * factor, y * factor, (x + width) * factor - 1, (y + height) * factor - 1), fill=colour)
    elif kind == "dot":
        _, x, y, radius, colour = shape
        draw.ellipse([v * factor for v in (x - radius, y - radius, x + radius, y + radius)], fill=colour)
    else:
        _write(image, shape, factor)


def _write(image: Image.Image, shape: tuple[Any, ...], factor: int) -> None:
    _, x, y, text, size, colour, anchor, upright, bold = shape
    font = _font(round(size * factor))
    left, top, right, bottom = font.getbbox(text)
    mask = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2), 0)
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, fill=255, font=font, stroke_width=factor // 2 if bold else 0)
    along = {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    if upright:
        mask = mask.rotate(90, expand=True)
        corner = (x * factor - mask.width / 2, y * factor - mask.height * (1 - along))
    else:
        corner = (x * factor - mask.width * along, y * factor - mask.height / 2)
    image.paste(colour, (round(corner[0]), round(corner[1])), mask)


def _font(size: int) -> Any:
    for name in ("DejaVuSans.ttf", "Verdana.ttf", "Arial.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except (OSError, ImportError):  # no such font, or a Pillow without FreeType
            continue
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError):  # Pillow before 10.1 knows one small font only
        return ImageFont.load_default()
