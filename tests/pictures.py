"""Image files of given sizes, where their pixels do not matter."""

import io
import os
import struct
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path

from PIL import Image


def make_pictures(folder: Path, sizes: Iterable[tuple[int, int]], caption: str | None = None) -> list[Path]:
    """0.png, 1.png, ... of the sizes (width, height), each of another colour; with N.txt if there is a caption."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, size in enumerate(sizes):
        paths.append(folder / f"{i}.png")
        Image.new("RGB", size, (i * 20 % 256, 80, 90)).save(paths[-1], compress_level=1)
        if caption is not None:
            paths[-1].with_suffix(".txt").write_text(caption, encoding="utf-8")
    return paths


def png_header(width: int, height: int) -> bytes:
    """An image of which only the header is whole: enough for all who place it."""
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        out += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return out


def spoil(path: Path) -> None:
    """Overwrite a file so that it is no image any more; its length and time stay."""
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def pillow_size(data: bytes) -> tuple[int, int] | None:
    """The size that Pillow reads from a file's bytes; None where it takes them for no image."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                return image.size
        except Exception:
            return None
