"""Small drawings as SVG or PNG: lines, boxes, dots and texts on a white sheet.

The same shapes become both formats, SVG by hand and PNG by Pillow, so a chart needs no plotting library. A shape paints
itself onto a picture `factor` times as large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Protocol

from PIL import Image, ImageDraw, ImageFont

__all__ = ["FONT", "Box", "Dot", "Drawing", "Line", "Shape", "Text"]

FONT = "DejaVu Sans, Verdana, Arial, sans-serif"


class Shape(Protocol):
    """One of the classes below."""

    def svg(self) -> str:
        """The element."""

    def paint(self, image: Image.Image, draw: ImageDraw.ImageDraw, factor: int) -> None:
        """Onto `image`, of which `draw` is the brush."""


@dataclass(frozen=True)
class Line:
    """A line through two or more points."""

    points: list[tuple[float, float]]
    colour: str
    width: float

    def svg(self) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)
        return f'<polyline points="{path}" fill="none" stroke="{self.colour}" stroke-width="{self.width:g}"/>'

    def paint(self, image: Image.Image, draw: ImageDraw.ImageDraw, factor: int) -> None:
        scaled = [(x * factor, y * factor) for x, y in self.points]
        draw.line(scaled, fill=self.colour, width=max(1, round(self.width * factor)), joint="curve")


@dataclass(frozen=True)
class Box:
    """A filled rectangle; (x, y) is its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    colour: str

    def svg(self) -> str:
        place = f'x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{self.height:.1f}"'
        return f'<rect {place} fill="{self.colour}"/>'

    def paint(self, image: Image.Image, draw: ImageDraw.ImageDraw, factor: int) -> None:
        left, top, width, height = (v * factor for v in (self.x, self.y, self.width, self.height))
        if width >= 1 and height >= 1:
            end = (self.x + self.width) * factor - 1, (self.y + self.height) * factor - 1
            draw.rectangle((left, top, *end), fill=self.colour)


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    radius: float
    colour: str

    def svg(self) -> str:
        return f'<circle cx="{self.x:.1f}" cy="{self.y:.1f}" r="{self.radius:g}" fill="{self.colour}"/>'

    def paint(self, image: Image.Image, draw: ImageDraw.ImageDraw, factor: int) -> None:
        x, y, radius = self.x, self.y, self.radius
        draw.ellipse([v * factor for v in (x - radius, y - radius, x + radius, y + radius)], fill=self.colour)


@dataclass(frozen=True)
class Text:
    """A text, placed as `Drawing.text` says."""

    x: float
    y: float
    text: str
    size: int
    colour: str
    anchor: str
    upright: bool
    bold: bool

    def svg(self) -> str:
        turn = f' transform="rotate(-90 {self.x:.1f} {self.y:.1f})"' if self.upright else ""
        weight = ' font-weight="bold"' if self.bold else ""
        # A third of the size below the middle line is where the baseline of these fonts lies.
        return (
            f'<text x="{self.x:.1f}" y="{self.y:.1f}" dy="0.35em" font-size="{self.size}" fill="{self.colour}" '
            f'text-anchor="{self.anchor}"{weight}{turn}>{escape(self.text)}</text>'
        )

    def paint(self, image: Image.Image, draw: ImageDraw.ImageDraw, factor: int) -> None:
        font, stroke = _font(round(self.size * factor)), factor // 2 if self.bold else 0
        left, top, right, bottom = font.getbbox(self.text)
        mask = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2), 0)
        ImageDraw.Draw(mask).text((1 - left, 1 - top), self.text, fill=255, font=font, stroke_width=stroke)
        along = {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]
        x, y = self.x * factor, self.y * factor
        if self.upright:
            mask = mask.rotate(90, expand=True)
            corner = (x - mask.width / 2, y - mask.height * (1 - along))
        else:
            corner = (x - mask.width * along, y - mask.height / 2)
        image.paste(self.colour, (round(corner[0]), round(corner[1])), mask)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    for name in ("DejaVuSans.ttf", "Verdana.ttf", "Arial.ttf"):
        try:
            return ImageFont.truetype(name, size)
        except (OSError, ImportError):  # no such font, or a Pillow without FreeType
            continue
    try:
        return ImageFont.load_default(size)
    except (TypeError, ImportError):  # Pillow before 10.1 knows one small font only
        return ImageFont.load_default()


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
