"""Formats of images and clips, by name and by content; and why a file cannot be read."""

from __future__ import annotations

import enum
import errno
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
"""Endings of caption files beside an image, in order of preference."""

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
    """The format of an ending such as `.JPG`; `UNKNOWN` for other endings."""
    return _BY_EXTENSION.get(extension.lower(), ImageFormat.UNKNOWN)


VIDEO_EXTENSIONS = frozenset((".mp4", ".webm", ".avi", ".mkv", ".mov", ".flv", ".wmv", ".m4v", ".mpg", ".mpeg"))
"""File name endings of clips, in lower case: those of musubi-tuner (`dataset/media_utils.py`)."""

_FRAMES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif")


def is_video(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a clip by its name."""
    return os.path.splitext(os.fspath(path))[1].lower() in VIDEO_EXTENSIONS


@cache
def frame_endings() -> frozenset[str]:
    """File name endings of images, as musubi-tuner compares them: in lower or upper case."""
    jxl = (".jxl",) if any(importlib.util.find_spec(name) for name in ("jxlpy", "pillow_jxl")) else ()
    return frozenset((*_FRAMES, *jxl, *map(str.upper, (*_FRAMES, *jxl))))


def is_listed(name: str) -> bool:
    """Whether a file or folder counts when a folder is listed. As in the trainers, names with a leading dot do not
    (notebooks, macOS and `fix` make them), nor does `__MACOSX`.
    """
    return not name.startswith(".") and name != "__MACOSX"


def sniff(head: bytes) -> ImageFormat:
    """The format by the first 32 bytes of a file."""
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
    """A file whose size cannot be read; the text says why."""


def explain_os_error(error: Exception) -> str:
    """A short reason for an error of the operating system, or of Python for an impossible path."""
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
    """The reason for an image that Pillow cannot load, in the same words everywhere."""
    return f"cannot be read as an image ({in_short(error)})"


def not_loaded(error: BaseException) -> str:
    """The reason for an image or anything else that cannot be loaded: else the type of the error and its first line.

    A bug in this package is not the image's fault, and is raised again.
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
    """Whether the error was raised in this package."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code.co_filename.startswith(_PACKAGE)


_MAY_PASS = errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT
_REMEDIES = {
    "no such file": "correct the path",
    "MAX_TEXT": "save it without its text",
    **dict.fromkeys(("MAX_IMAGE_PIXELS", "decompression bomb", "no memory for"), "make it smaller"),
    "its bucket was chosen": "run again, if it was just edited",
    **dict.fromkeys(("permission denied", os.strerror(errno.EACCES)), "make it readable"),
    **dict.fromkeys(map(os.strerror, _MAY_PASS), "run again, nothing says that it is damaged"),
}  # by part of the reason


def what_to_do(*reasons: str) -> str:
    """What to do about images that cannot be read for these reasons."""
    remedies = dict.fromkeys(
        next((remedy for part, remedy in _REMEDIES.items() if part in reason), "repair or remove it")
        for reason in reasons
    )
    return ", or ".join(remedies)


def in_short(error: BaseException) -> str:
    """The text of an error in one line of at most 120 characters, without the system's path or Pillow's file object."""
    text = error.strerror if isinstance(error, OSError) and error.filename is not None else str(error)
    return " ".join(str(text).partition(" <_io.")[0].split())[:120]
