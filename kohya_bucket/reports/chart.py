"""The chart of a bucket set: aspects and switching points on one axis, portrait and landscape apart, as SVG."""

from __future__ import annotations

from html import escape
from itertools import pairwise

import numpy as np

from kohya_bucket.buckets import BucketSet, switching_points
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.files import MADE_BY
from kohya_bucket.texts import counted

FONT = "DejaVu Sans, Verdana, Arial, sans-serif"


class Drawing:
    """Shapes in pixels, the origin at the upper left, painted in the order they were added."""

    def __init__(self, width: int, height: int, title: str = "", ground: str = "#ffffff") -> None:
        self.width, self.height, self.title, self.ground = width, height, title, ground
        self._shapes: list[str] = []

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1.0) -> None:
        """Through two or more points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """A filled rectangle; (x, y) is its upper left corner."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._shapes.append(f'<rect {place} fill="{colour}"/>')

    def dot(self, x: float, y: float, radius: float, colour: str) -> None:
        """A filled circle."""
        self._shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>')

    def text(
        self, x: float, y: float, text: str, *, size: int = 12, colour: str = "#222222", anchor: str = "start",
        upright: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """A text whose middle line is at y; `anchor` is start, middle or end.

        `upright` turns it to be read upwards; it then starts, ends or is centred at y along the page's height, and its
        middle line is at x.
        """
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
        weight = ' font-weight="bold"' if bold else ""
        # A third of the size below the middle line is where the baseline of these fonts lies.
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" dy="0.35em" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}{turn}>{escape(text)}</text>'
        )

    def to_svg(self) -> str:
        """The drawing as an SVG document."""
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}" role="img">\n<!-- {MADE_BY} -->\n'
            f"<title>{escape(self.title)}</title>\n"
            f'<rect width="{self.width}" height="{self.height}" fill="{self.ground}"/>\n{shapes}\n</svg>\n'
        )


def spread_labels(wanted: FloatArray, gap: float, low: float, high: float) -> FloatArray:
    """Positions at least `gap` apart within low..high, as near to the ascending `wanted` ones as that allows.

    Minimises the sum of squared shifts (pooling of neighbours that would overlap). The caller makes sure that
    `(len(wanted) - 1) * gap` fits into the range.
    """
    if not len(wanted):
        return wanted
    offsets = np.arange(len(wanted)) * gap
    # With the gaps taken off, the positions only have to be ascending.
    means: list[float] = []
    sizes: list[int] = []
    for mean, size in zip((wanted - offsets).tolist(), [1] * len(wanted), strict=True):
        while means and means[-1] > mean:
            total = sizes[-1] + size
            mean, size = (means.pop() * sizes.pop() + mean * size) / total, total
        means.append(mean)
        sizes.append(size)
    return np.asarray(np.clip(np.repeat(means, sizes), low, high - offsets[-1]) + offsets)


_WIDTH, _LEFT, _RIGHT = 1180, 46, 24
_BLUE, _ORANGE, _GREY, _INK = "#1f5fa8", "#d9650b", "#8a8a8a", "#222222"
_BANDS = ("#dce8f5", "#f3f6fa")
_GAP = 13.0
_TICKS = (1, 1.1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20)


def aspect_chart(
    bucket_set: BucketSet, method: str = "midpoint", sizes: IntArray | None = None, title: str = ""
) -> Drawing:
    """Draw a set.

    Args:
        method: which switching points are drawn.
        sizes: [N, 2] sizes of images, shown as counts above the axis; rows with a side below 1 are left out.
        title: heading; by default the set's name and size.

    Raises:
        BucketSettingsError: an unknown method.
    """
    readable = np.zeros((0, 2)) if sizes is None else sizes[sizes.min(axis=1, initial=1) > 0]
    images = np.asarray(readable[:, 0] / readable[:, 1])
    sides = [_Side(bucket_set, method, images, portrait) for portrait in (False, True)]
    sides = [side for side in sides if len(side.aspects)]
    reach = max(1.3, max(float(side.aspects.max()) for side in sides) * 1.06)
    rug = 74 if len(images) else 0
    panel = 302 + rug
    heading = title or f"{bucket_set.name or 'bucket set'}: {len(bucket_set)} buckets"
    drawing = Drawing(_WIDTH, 64 + panel * len(sides), title=f"{heading}, switching by {method}")
    drawing.text(_LEFT, 24, heading, size=18, bold=True)
    note = f"blue: buckets; orange: where images switch to the next bucket ({method})"
    if rug:
        note += f"; bars: {counted(len(images), 'image')}"
    drawing.text(_LEFT, 48, note, size=13, colour="#555555")
    for number, side in enumerate(sides):
        _panel(drawing, side, 64 + panel * number, reach, rug)
    return drawing


class _Side:
    """One orientation: aspects counted from 1 upwards, the longer side over the shorter one."""

    def __init__(self, bucket_set: BucketSet, method: str, images: FloatArray, portrait: bool) -> None:
        aspects, points = bucket_set.aspects, np.array([p.aspect for p in switching_points(bucket_set, method)])
        if portrait:
            aspects, points, images = 1 / aspects, 1 / points, 1 / images
        # A set may hold one aspect in several sizes: one label for the first two of them.
        names: dict[float, list[str]] = {}
        for k in np.argsort(aspects, kind="stable"):
            if aspects[k] >= 1:
                names.setdefault(float(aspects[k]), []).append(str(bucket_set[int(k)]))
        self.title, self.unit = ("portrait", "height / width") if portrait else ("landscape", "width / height")
        self.aspects = np.array(list(names))
        self.names = [f"{'+'.join(many[:2])}{'…' if len(many) > 2 else ''}  {a:.3f}" for a, many in names.items()]
        self.points = np.sort(points[points > 1])
        self.images = images[images > 1] if portrait else images[images >= 1]


def _panel(drawing: Drawing, side: _Side, top: float, reach: float, rug: int) -> None:
    left, right = _LEFT, _WIDTH - _RIGHT

    def at(aspect: FloatArray | float) -> FloatArray:
        return np.asarray(left + np.log(np.minimum(aspect, reach)) / np.log(reach) * (right - left))

    drawing.text(left, top + 14, side.title, size=15, bold=True)
    if rug:
        beyond = int((side.images > reach).sum())
        count = counted(len(side.images), "image") + (f", {beyond:,} of them beyond the axis" if beyond else "")
        drawing.text(left + 108, top + 15, count, size=12, colour="#555555")
    drawing.text(right, top + 14, side.unit, size=12, colour="#555555", anchor="end")
    strip = top + 154 + rug
    edges = np.concatenate([[left], at(side.points), [right]])
    for j, (a, b) in enumerate(pairwise(edges.tolist())):
        drawing.box(a, strip, b - a, 26, _BANDS[j % 2])
    if rug:
        _bars(drawing, side, strip - 6, reach)
    _labels(drawing, at(side.aspects), side.names, strip - rug - 8, strip + 13, _BLUE, above=True)
    for x in at(side.aspects).tolist():
        drawing.dot(x, strip + 13, 4, _BLUE)
    for x in at(side.points).tolist():
        drawing.line([(x, strip - 4), (x, strip + 30)], _ORANGE, 1.4)
    _labels(drawing, at(side.points), [f"{p:.4f}" for p in side.points], strip + 44, strip + 30, _ORANGE, above=False)
    axis = strip + 112
    drawing.line([(left, axis), (right, axis)], _GREY)
    for tick in (t for t in _TICKS if t <= reach):
        x = float(at(float(tick)))
        drawing.line([(x, axis), (x, axis + 5)], _GREY)
        drawing.text(x, axis + 14, f"{tick:g}", size=11, colour="#555555", anchor="middle")


def _labels(
    drawing: Drawing, marks: FloatArray, names: list[str], at: float, mark_at: float, colour: str, above: bool
) -> None:
    """Upright names joined to their marks; where there are too many, only as many as fit, evenly."""
    every = max(1, -(-int(len(names) * _GAP) // (_WIDTH - _LEFT - _RIGHT)))
    marks, names = marks[::every], names[::every]
    places = spread_labels(marks, _GAP, _LEFT, _WIDTH - _RIGHT)
    bend = at + 4 if above else at - 4
    for mark, place, name in zip(marks.tolist(), places.tolist(), names, strict=True):
        drawing.line([(place, bend), (mark, bend + 10 if above else bend - 10), (mark, mark_at)], colour, 0.7)
        drawing.text(place, at, name, size=11, colour=colour, anchor="start" if above else "end", upright=True)


def _bars(drawing: Drawing, side: _Side, base: float, reach: float) -> None:
    """How many images have each aspect, in narrow bars; those beyond the axis are counted in the last one."""
    room, bar = _WIDTH - _LEFT - _RIGHT, 4
    counts, _ = np.histogram(np.log(np.minimum(side.images, reach)), bins=room // bar, range=(0, np.log(reach)))
    for j in np.flatnonzero(counts):
        height = max(1.0, 50 * counts[j] / counts.max())
        drawing.box(_LEFT + j * bar, base - height, bar - 1, height, "#9aa7b5")
