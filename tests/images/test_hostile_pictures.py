"""Files that are no whole picture: they cost little, and are named."""

import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from PIL import features

from kohya_bucket.images import list_images, read_sizes
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.headers import header_of
from tests.pictures import make_pictures

MIB = 1 << 20
LONG = 300 * MIB
TIFF = struct.pack("<4sIHHHIIHHII", b"II*\0", 8, 2, 256, 4, 1, 16, 37724, 1, 290 * MIB, 8)
BEGINNINGS = {
    "x.avif": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf",
    "x.heic": b"\0\0\0\x1cftypheic\0\0\0\0heicmif1miaf",
    "x.jxl": b"\xff\x0a" + bytes(30),
    "x.webp": b"RIFF\xff\xff\xff\xffWEBPVP8X\x0b\0\0\0",
    "x.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(20) + b"\x10\0\0\0eXIf",
    "x.bin": bytes(8),
}


def sparse(path: Path, beginning: bytes, length: int = LONG) -> Path:
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(length)
    return path


@pytest.mark.parametrize("name", BEGINNINGS)
def test_hundreds_of_megabytes_of_nothing_are_not_read(tmp_path: Path, name: str) -> None:
    path = sparse(tmp_path / name, BEGINNINGS[name])
    tracemalloc.start()
    try:
        scan = read_sizes([path], engine="alone", verify=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [i for i, _, _ in scan.failures] == [0]
    assert peak < 32 * MIB


@pytest.mark.slow
def test_a_tag_of_hundreds_of_megabytes_is_not_read_to_its_end(tmp_path: Path) -> None:
    scan = read_sizes([sparse(tmp_path / "x.tif", TIFF)], engine="alone")
    assert "not found in the first 256 MiB of 314,572,800 bytes" in scan.failures[0][2]


@pytest.mark.long
@pytest.mark.parametrize("beginning", [b"\xff\xd8\xff\xe0\0\x10JFIF\0" + bytes(20), b"GIF89a\1\0\1\0\0\0\0", b"P6\n#"])
def test_no_decoder_looks_for_a_header_without_end(tmp_path: Path, beginning: bytes) -> None:
    """Pillow would go on byte by byte, for hours."""
    path = sparse(tmp_path / "x.jpg", beginning, 2**36 if os.name == "posix" else LONG)
    assert "MiB" in read_sizes([path], engine="alone").failures[0][2]


@pytest.mark.skipif(not features.check("avif"), reason="a Pillow without AVIF")
def test_what_is_in_memory_or_part_of_a_file_is_bounded_too() -> None:
    class Endless:
        length = 2**40

        def read_at(self, offset: int, length: int) -> bytes:
            assert length <= MIB
            return BEGINNINGS["x.avif"].ljust(length, b"\0") if offset == 0 else bytes(length)

    with pytest.raises(UnreadableImageError, match="MiB"):
        header_of(Endless())


@pytest.mark.posix("named pipes, links and devices of POSIX")
def test_a_scan_names_what_is_no_file_and_goes_on(tmp_path: Path) -> None:
    make_pictures(tmp_path, [(30, 20)])
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    paths = list_images(tmp_path)
    assert [Path(path).name for path in paths] == ["0.png", "loop.png", "pipe.png", "zero.png"]
    scan = read_sizes(paths, verify=True)
    assert scan.sizes.tolist() == [[30, 20], [0, 0], [0, 0], [0, 0]]
    reasons = [reason for _, _, reason in scan.failures]
    assert reasons[1:] == ["not a regular file"] * 2
    assert "symbolic links" in reasons[0]
