"""Absolute paths for many files."""

from __future__ import annotations

import os
from collections.abc import Iterable

from kohya_bucket.images.remote import is_url
from kohya_bucket.images.text_column import TextColumn

__all__ = ["absolute_paths"]


def absolute_paths(paths: Iterable[str | os.PathLike[str]]) -> list[str] | TextColumn:
    """What `os.path.abspath` says for each, without its cost where a look shows that it changes nothing."""
    if os.name == "nt":
        texts = [os.fspath(path) for path in paths]
        return [text if is_url(text) else os.path.abspath(text) for text in texts]
    here = os.getcwd().rstrip("/") + "/"
    out = []
    for path in paths:
        text = os.fspath(path)
        if "/." in text or "//" in text or text[-1:] in ("/", "") or text[:1] == ".":
            text = text if is_url(text) else os.path.abspath(text)
        elif text[0] != "/":
            text = here + text
        out.append(text)
    return out
