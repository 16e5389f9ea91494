"""Small drawings as SVG or PNG: lines, boxes, dots and texts on a white sheet.

The same shapes become both formats, SVG by hand and PNG by Pillow, so a chart needs no plotting library.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from PIL import Image, ImageDraw

from kohya_bucket.reports.shapes import FONT, Box, Dot, Line, Shape, Text

__all__ = ["Drawing"]

# PNGs are drawn larger and scaled down, which smooths lines.
_OVERSAMPLING = 2


@dataclass
class Drawing:
    """Shapes in pixels, the origin at the upper left, painted in the order they were added."""

    width: int
    height: int
    title: str = ""
    shapes: list[Shape] = field(default_factory=list)

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1.0) -> None:
        """A line through two or more points."""
        self.shapes.append(Line(points, colour, width))

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle; (x, y) is its upper left corner."""
        self.shapes.append(Box(x, y, width, height, colour))

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """A filled circle."""
        self.shapes.append(Dot(x, y, radius, colour))

    def text(
        self, x: float, y: float, text: str, size: int = 12, colour: str = "#222222", anchor: str = "start",
        upright: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """A text whose middle line is at y; `anchor` is start, middle or end. `upright` turns it to be read upwards;
        it then starts, ends or is centred at y along the page's height, and its middle line is at x."""
        self.shapes.append(Text(x, y, text, size, colour, anchor, upright, bold))

    def to_svg(self) -> str:
        """The drawing as an SVG document."""
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>',
        ]
        out += [shape.svg() for shape in self.shapes]
        return "\n".join([*out, "</svg>", ""])

    def to_image(self, scale: int = 1) -> Image.Image:
        """The drawing as an RGB picture, `scale` times as large."""
        factor = scale * _OVERSAMPLING
        image = Image.new("RGB", (self.width * factor, self.height * factor), "#ffffff")
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            shape.paint(image, draw, factor)
        return image.resize((self.width * scale, self.height * scale), Image.Resampling.LANCZOS)
