"""How objects show themselves in a notebook: one piece of HTML with a chart and a table of buckets.

It needs nothing from elsewhere, takes the colours of the page around it, and stays small however many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from kohya_bucket.texts import one_line

MOST_ROWS = 40
_MOST_DOTS = 400
_MOST_SIGNS = 200
_WIDTH, _HEIGHT, _LABELS = 640, 120, 58
_COLOUR = "#4a86c5"


def view(title: str, notes: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[object]], chart: str) -> str:
    """A heading, lines of text, a chart (of `bars` or `dots`) and the first `MOST_ROWS` rows of a table.

    Names may be anybody's: of all texts signs are escaped, and long ones are cut.
    """
    lines = "".join(f"<br>{_text(note)}" for note in notes)
    table = table_markup(header, [map(_cut, row) for row in rows[:MOST_ROWS]])
    more = f"<p>… and {len(rows) - MOST_ROWS:,} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<div><p><b>{_text(title)}</b>{lines}</p>{chart}{table}{more}</div>"


def markup_safe(text: object) -> str:
    """A text of anybody's making as markup that shows it."""
    # File names may hold bytes that are no text; a file in UTF-8 cannot.
    return escape(one_line(text))


def table_markup(head: Sequence[str], rows: Iterable[Iterable[object]], caption: str = "") -> str:
    """A table as markup; the first cell of a row is its header."""
    top = "".join(f'<th scope="col">{markup_safe(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{markup_safe(first)}</th><td>{"</td><td>".join(map(markup_safe, cells))}</td></tr>'
        for first, *cells in rows
    )
    above = f"<caption>{markup_safe(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def fullest(values: Sequence[int]) -> list[int]:
    """Positions of the `MOST_ROWS` largest values above 0, in their order."""
    used = [k for k, value in enumerate(values) if value > 0]
    return sorted(sorted(used, key=lambda k: -values[k])[:MOST_ROWS])


def bars(names: Sequence[str], values: Sequence[int], what: str) -> str:
    """An upright bar for each of the first `MOST_ROWS` values, of which the tallest fills the height."""
    names, values = names[:MOST_ROWS], values[:MOST_ROWS]
    most, step = max([*values, 1]), min(48.0, _WIDTH / max(len(values), 1))
    marks = []
    for k, (name, value) in enumerate(zip(names, values, strict=True)):
        x, height = k * step, _HEIGHT * value / most
        marks.append(
            f'<g><title>{_text(name)}: {value:,} {_text(what)}</title><rect x="{x + 1:.1f}" y="{_HEIGHT - height:.1f}" '
            f'width="{step - 2:.1f}" height="{height:.1f}" fill="{_COLOUR}"/><text font-size="9" fill="currentColor" '
            f'text-anchor="end" transform="translate({x + step / 2 + 3:.1f} {_HEIGHT + 4}) rotate(-90)">{_text(name)}'
            "</text></g>"
        )
    return _svg(f"{what} of each bucket", marks, _HEIGHT + _LABELS)


def dots(names: Sequence[str], across: Sequence[float], up: Sequence[float], what: str) -> str:
    """A dot for each name at (across, up), both scaled to the drawing; evenly fewer where there are very many."""
    every = -(-len(names) // _MOST_DOTS)
    points = list(zip(names, across, up, strict=True))[::every]
    (left, right), (low, high) = (min(across), max(across)), (min(up), max(up))
    marks = []
    for name, x, y in points:
        at = 8 + (_WIDTH - 16) * ((x - left) / (right - left) if right > left else 0.5)
        down = 8 + (_HEIGHT - 16) * ((high - y) / (high - low) if high > low else 0.5)
        marks.append(
            f'<circle cx="{at:.1f}" cy="{down:.1f}" r="4" fill="{_COLOUR}"><title>{_text(name)}</title></circle>'
        )
    return _svg(what, marks, _HEIGHT)


def _svg(title: str, marks: Sequence[str], height: int) -> str:
    line = f'<line x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}" stroke="currentColor" stroke-opacity="0.4"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" style="max-width:100%"><title>{_text(title)}</title>{"".join(marks)}{line}</svg>'
    )


def _cut(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= _MOST_SIGNS else text[:_MOST_SIGNS] + "…"


def _text(value: object) -> str:
    return escape(_cut(value))
