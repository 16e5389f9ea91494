"""Which files are clips, and which images of a folder are the frames of one.

The endings are those of musubi-tuner (`dataset/media_utils.py`).
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

__all__ = ["VIDEO_EXTENSIONS", "frame_endings", "frames_in", "is_video"]

VIDEO_EXTENSIONS = frozenset((".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"))
"""File name endings, in lower case, that count as clips when a folder is listed."""

_FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif")


def is_video(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name says that it is a clip."""
    return os.path.splitext(os.fspath(path))[1].lower() in VIDEO_EXTENSIONS


def frames_in(folder: str) -> list[str]:
    """The images of a folder that are the frames of a clip, in the order of their names."""
    endings = frame_endings()
    return sorted(
        os.path.join(folder, name) for name in os.listdir(folder) if os.path.splitext(name)[1] in endings
    )  # a folder of such a name is taken too, as there, and cannot be read


@cache
def frame_endings() -> frozenset[str]:
    """File name endings of images, as musubi-tuner compares them: in lower case or in upper case."""
    jxl = (".jxl",) if any(importlib.util.find_spec(name) for name in ("jxlpy", "pillow_jxl")) else ()
    return frozenset(ending for one in (*_FRAMES, *jxl) for ending in (one, one.upper()))
