"""A page as one file: no request to anywhere, nothing in it that a file name could turn into markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from kohya_bucket.texts import one_line

SHARED_SCRIPTS = tuple(f"shared/{name}.js" for name in ("placement", "dom", "table", "aspect_chart", "answer"))
"""What all pages have: one placement, and the same words and pictures for it."""


def markup_safe(text: object) -> str:
    """A text of anybody's making as markup that shows it."""
    # File names may hold bytes that are not text; a file in UTF-8 cannot.
    return escape(one_line(text))


def one_file(
    data: Any,
    scripts: Iterable[str],
    styles: Iterable[str],
    *,
    title: str,
    about: str,
    fallback: str,
    pictures: str = "data: blob:",
) -> str:
    """The text of an HTML file.

    Args:
        data: what the scripts find as JSON in the element `data`.
        scripts, styles: files in `templates/`, joined in this order.
        title: for the tab and for lists of links.
        about: one line for who comes by such a link.
        fallback: markup for browsers without JavaScript; names in it went through `markup_safe`.
        pictures: where the content security policy lets pictures come from.
    """
    script, style = ("".join(map(_template, names)) for names in (scripts, styles))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        f"img-src {pictures}; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "STYLE": style,
        "SCRIPT": script,
        "DATA": _script_safe(data),
        "ICON": _ICON,
        "TITLE": markup_safe(title),
        "ABOUT": markup_safe(about),
        "FALLBACK": fallback,
    }
    # Cut first, then fill: what is filled in is never searched for marks.
    pieces = _template("shared/page.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


# The mark: three buckets about one middle, in a colour that light and dark pages show.
_BOXES = ((2, 9, 28, 14), (9, 2, 14, 28), (6, 6, 20, 20))
_RECTS = "".join(f"<rect x='{x}' y='{y}' width='{w}' height='{h}' rx='2'/>" for x, y, w, h in _BOXES)
_ICON = "data:image/svg+xml;base64," + base64.b64encode(
    f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32' fill='none' stroke='#2a938c' stroke-width='2.5'>"
    f"{_RECTS}</svg>".encode()
).decode("ascii")


@cache
def _template(name: str) -> str:
    # The policy names the hash of what the browser parses, in which every line end is a line feed.
    text = resources.files("kohya_bucket.reports").joinpath("templates", *name.split("/")).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _script_safe(data: Any) -> str:
    """JSON in which no character can end the script element: all of <, >, & and everything beyond ASCII escaped."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
