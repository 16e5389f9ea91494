"""Formats of images and clips by name and by content, and why a file has no size."""

from __future__ import annotations

import enum
import importlib.util
import os
from functools import cache
from pathlib import Path

MAX_SIDE = 2**31 - 1
"""Pixels of a side, as arrays of sizes hold them."""

HeaderRow = tuple[int, int, int, int]
"""(width, height, EXIF orientation, `ImageFormat`) of one file, as plain numbers."""


class ImageFormat(enum.IntEnum):
    """What a file holds, by its content. The numbers are stored in caches: never renumber them."""

    UNKNOWN = 0
    PNG = 1
    JPEG = 2
    WEBP = 3
    GIF = 4
    BMP = 5
    TIFF = 6
    AVIF = 7
    HEIC = 8
    JXL = 9
    OTHER = 10


_EXTENSIONS = {
    ImageFormat.PNG: (".png", ".apng"),
    ImageFormat.JPEG: (".jpg", ".jpeg", ".jpe", ".jfif"),
    ImageFormat.WEBP: (".webp",),
    ImageFormat.GIF: (".gif",),
    ImageFormat.BMP: (".bmp", ".dib"),
    ImageFormat.TIFF: (".tif", ".tiff"),
    ImageFormat.AVIF: (".avif",),
    ImageFormat.HEIC: (".heic", ".heif"),
    ImageFormat.JXL: (".jxl",),
}
_BY_EXTENSION = {ending: kind for kind, endings in _EXTENSIONS.items() for ending in endings}

IMAGE_EXTENSIONS = frozenset(_BY_EXTENSION)
"""File name endings, in lower case, that count as images when a folder is listed."""

CAPTION_EXTENSIONS = (".txt", ".caption")
"""Endings of the text files beside an image that are taken for its caption, in this order."""

_BEGINNINGS: dict[ImageFormat, bytes | tuple[bytes, ...]] = {
    ImageFormat.PNG: b"\x89PNG\r\n\x1a\n",
    ImageFormat.JPEG: b"\xff\xd8\xff",
    ImageFormat.GIF: (b"GIF87a", b"GIF89a"),
    ImageFormat.BMP: b"BM",
    ImageFormat.TIFF: (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    ImageFormat.JXL: (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"),
}
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")


def format_of_extension(extension: str) -> ImageFormat:
    """Format that a file name ending such as `.JPG` promises; `UNKNOWN` for endings not listed here."""
    return _BY_EXTENSION.get(extension.lower(), ImageFormat.UNKNOWN)


VIDEO_EXTENSIONS = frozenset((".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"))
"""The same of clips: those of musubi-tuner (`dataset/media_utils.py`)."""

_FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif")


def is_video(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name says that it is a clip."""
    return os.path.splitext(os.fspath(path))[1].lower() in VIDEO_EXTENSIONS


@cache
def frame_endings() -> frozenset[str]:
    """File name endings of images, as musubi-tuner compares them: in lower case or in upper case."""
    jxl = (".jxl",) if any(importlib.util.find_spec(name) for name in ("jxlpy", "pillow_jxl")) else ()
    return frozenset(ending for one in (*_FRAMES, *jxl) for ending in (one, one.upper()))


def is_listed(name: str) -> bool:
    """Whether a file or folder in a folder counts: as in the trainers' own lists, not what begins with a dot (of
    notebooks, macOS and `fix`, beside what is meant); nor the folder in which macOS keeps more of that.
    """
    return not name.startswith(".") and name != "__MACOSX"


def sniff(head: bytes) -> ImageFormat:
    """Format by the first bytes of a file (32 are enough)."""
    for kind, beginnings in _BEGINNINGS.items():
        if head.startswith(beginnings):
            return kind
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return ImageFormat.WEBP
    if head[4:8] == b"ftyp":
        brands = [head[8:12], *(head[i : i + 4] for i in range(16, 32, 4))]
        if b"avif" in brands or b"avis" in brands:
            return ImageFormat.AVIF
        if any(brand in _HEIC_BRANDS for brand in brands):
            return ImageFormat.HEIC
    return ImageFormat.UNKNOWN


class UnreadableImageError(Exception):
    """A file whose size cannot be told; the text says why."""


def explain_os_error(error: Exception) -> str:
    """One phrase for what the operating system said, or Python of a path that it does not take."""
    if not isinstance(error, OSError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "no such file"
    if isinstance(error, IsADirectoryError):
        return "a folder, not a file"
    if isinstance(error, PermissionError):
        return "permission denied"
    return error.strerror or in_short(error) or type(error).__name__


def not_decoded(error: BaseException) -> str:
    """What Pillow said of an image that cannot be loaded, in the words that every command and log has for it."""
    return f"cannot be read as an image ({in_short(error)})"


def not_loaded(error: BaseException) -> str:
    """The same of whatever was to be loaded: of anything but an image the kind of error and the first line of it.

    A mistake in this package is not the image's fault, and is raised again.
    """
    if isinstance(error, _MISTAKES) and _raised_here(error):
        raise error
    if isinstance(error, OSError) and error.errno is None:  # Pillow's own, not the system's
        return not_decoded(error)
    if isinstance(error, UnreadableImageError):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


_MISTAKES = (AttributeError, NameError, TypeError, LookupError, AssertionError, ImportError)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def _raised_here(error: BaseException) -> bool:
    """Whether the last function that ran was one of this package."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code.co_filename.startswith(_PACKAGE)


_REMEDIES = {
    "no such file": "correct the path",
    "MAX_TEXT": "save it without its text",
    **dict.fromkeys(("MAX_IMAGE_PIXELS", "decompression bomb", "no memory for"), "make it smaller"),
    "its bucket was chosen": "run again, if it was just edited",
}  # by a part of the reason


def what_to_do(*reasons: str) -> str:
    """What helps images that have no size or are not decoded, for these reasons."""
    found = dict.fromkeys(
        next((remedy for sign, remedy in _REMEDIES.items() if sign in reason), "repair or remove it")
        for reason in reasons
    )
    return ", or ".join(found)


def in_short(error: BaseException) -> str:
    """The text of an error, in one line of at most 120 characters, without the path that the system puts behind it, or
    the object of an open file that Pillow does."""
    text = error.strerror if isinstance(error, OSError) and error.filename is not None else str(error)
    return " ".join(str(text).partition(" <_io.")[0].split())[:120]
