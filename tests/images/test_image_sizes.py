"""Sizes from headers: equal to what Pillow says, for sound, damaged and invented files."""

import io
import itertools
import os
import random
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_corpus import corpus, encode, exif, picture
from PIL import Image

from kohya_bucket.images import ImageFormat, read_sizes
from kohya_bucket.images import by_pillow as decoder_module
from kohya_bucket.images import headers as header_module
from kohya_bucket.images.formats import UnreadableImageError, sniff
from kohya_bucket.images.headers import exif_orientation, header_of, read_header
from kohya_bucket.images.tar_index import TarIndex
from tests.pictures import pillow_size

CORPUS = corpus()
# Pillow has something to say about every damaged EXIF block.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")


def write(folder: Path, files: list[tuple[str, bytes]]) -> list[Path]:
    paths = []
    for name, data in files:
        path = folder / name
        path.write_bytes(data)
        paths.append(path)
    return paths


def from_memory(data: bytes) -> tuple[int, int]:
    try:
        return header_of(data)[:2]
    except UnreadableImageError:
        return (0, 0)


def assert_equals_pillow(folder: Path, files: list[tuple[str, bytes]]) -> None:
    paths = write(folder, files)
    scan = read_sizes(paths, engine="alone")
    failed = {i: reason for i, _, reason in scan.failures}
    for i, (name, data) in enumerate(files):
        expected = pillow_size(data)
        assert from_memory(data) == tuple(scan.sizes[i]), name
        if expected is not None:
            assert tuple(scan.sizes[i]) == expected, name
            assert i not in failed, name
        else:
            assert tuple(scan.sizes[i]) == (0, 0), name
            assert failed[i], name


@pytest.mark.parametrize(("name", "data"), CORPUS, ids=[name for name, _ in CORPUS])
def test_size_format_and_orientation_equal_pillows(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    width, height, orientation, kind = read_header(str(path))
    with Image.open(path) as image:
        assert (width, height) == image.size
        turned_by_pillow = image.format in ("TIFF", "HEIF")
        assert orientation == (1 if turned_by_pillow else image.getexif().get(0x0112, 1))
        assert kind == {"MPO": ImageFormat.JPEG, "HEIF": ImageFormat.HEIC}.get(
            image.format, ImageFormat.__members__.get(image.format, ImageFormat.OTHER)
        )


@pytest.mark.parametrize("name", ["baseline.jpg", "RGB.png", "lossy.webp", "alpha.webp"])
def test_common_files_are_read_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(decoder_module, "open_with_pillow", None)
    path = tmp_path / name
    path.write_bytes(dict(CORPUS)[name])
    assert read_header(str(path))[:2] == pillow_size(path.read_bytes())


def test_whole_corpus_at_once(tmp_path: Path) -> None:
    assert_equals_pillow(tmp_path, CORPUS)


@pytest.mark.weekly
def test_truncated_at_many_offsets(tmp_path: Path) -> None:
    rng = random.Random(1)
    files = []
    for name, data in CORPUS:
        cuts = {*range(0, min(len(data), 64), 3), *(rng.randrange(len(data)) for _ in range(12)), len(data) - 1}
        files += [(f"cut{cut}_{name}", data[:cut]) for cut in sorted(cuts)]
    assert_equals_pillow(tmp_path, files)


def test_mislabelled_files_have_a_size_and_are_named(tmp_path: Path) -> None:
    files = [
        ("png.jpg", encode(picture(), "PNG")),
        ("jpeg.webp", encode(picture(), "JPEG")),
        ("ok.JPEG", dict(CORPUS)["gray.jpg"]),
    ]
    scan = read_sizes(write(tmp_path, files))
    assert not scan.failures
    assert (scan.sizes == (67, 45)).all()
    assert [(i, text) for i, _, text in scan.mislabelled()] == [
        (0, "named as JPEG, but holds PNG"),
        (1, "named as WEBP, but holds JPEG"),
    ]


@pytest.mark.posix("POSIX permissions and named pipes")
def test_every_kind_of_unreadable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("<html>not found</html>", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "forbidden.png").write_bytes(encode(picture(), "PNG"))
    (tmp_path / "forbidden.png").chmod(0)
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    names = [
        "folder.png",
        "empty.png",
        "text.png",
        "pipe.png",
        "missing.png",
        "dangling.png",
        "x" * 300 + ".png",
        "a\0b.png",
    ]
    paths = [str(tmp_path / name) for name in names]
    if os.geteuid() != 0:
        paths.append(str(tmp_path / "forbidden.png"))
    scan = read_sizes(paths)
    assert [i for i, _, _ in scan.failures] == list(range(len(paths)))
    reasons = [reason for _, _, reason in scan.failures]
    assert reasons[:2] == ["a folder, not a file", "an empty file (0 bytes)"]
    assert "not an image" in reasons[2]
    assert "3c 68 74 6d 6c" in reasons[2]
    assert "not a regular file" in reasons[3]
    assert reasons[4] == reasons[5] == "no such file"
    assert not scan.readable.any()


def test_permission_denied_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(header_module.os, "open", refuse)
    assert read_sizes([tmp_path / "x.png"]).failures[0][2] == "permission denied"


def test_unicode_names(tmp_path: Path) -> None:
    names = ["猫 と 犬.png", "ünïcödé.png", "emoji 🐈.png", "quote'\".png" if os.name != "nt" else "quote'.png"]
    scan = read_sizes(write(tmp_path, [(name, encode(picture(), "PNG")) for name in names]))
    assert not scan.failures


def test_more_pixels_than_pillow_accepts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, [("big.png", encode(picture(), "PNG"))])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 67 * 45 // 2 - 1)
    assert "which Pillow refuses" in read_sizes(path).failures[0][2]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert not read_sizes(path).failures


def test_verify_names_files_whose_pixels_are_cut_off(tmp_path: Path) -> None:
    whole = encode(picture(), "JPEG")
    paths = write(tmp_path, [("whole.jpg", whole), ("cut.jpg", whole[: len(whole) // 2])])
    assert not read_sizes(paths).failures
    scan = read_sizes(paths, verify=True)
    assert [(i, "cannot be read" in reason) for i, _, reason in scan.failures] == [(1, True)]
    assert scan.sizes.tolist() == [[67, 45], [0, 0]]


def test_rotation_is_reported_and_left_to_the_caller(tmp_path: Path) -> None:
    scan = read_sizes(write(tmp_path, [(f"{o}.jpg", encode(picture(), "JPEG", exif=exif(o))) for o in range(1, 9)]))
    assert (scan.sizes == (67, 45)).all()
    assert scan.orientation.tolist() == list(range(1, 9))
    assert scan.rotated().tolist() == list(range(1, 8))
    assert scan.upright_sizes().tolist() == [[67, 45]] * 4 + [[45, 67]] * 4


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_headers_equal_pillow_wherever_it_can_open_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    files = []
    for name, data in CORPUS:
        for k in range(6):
            damaged = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                damaged[rng.randrange(min(len(data), rng.choice((40, 200, 1000))))] = rng.randrange(256)
            files.append((f"{k}_{name}", bytes(damaged)))
    paths = write(tmp_path, files)
    scan = read_sizes(paths, engine="alone")
    for i, (name, data) in enumerate(files):
        expected = pillow_size(data)
        if expected is not None:
            assert tuple(scan.sizes[i]) == expected, name
        elif scan.readable[i] and (stated := stated_size(data)):
            assert tuple(scan.sizes[i]) == stated, name
    assert {i for i, _, _ in scan.failures} == set(np.flatnonzero(~scan.readable).tolist())


def stated_size(data: bytes) -> tuple[int, int] | None:
    """What a PNG or a WebP says of its size, as their specifications have it, whether or not the rest can be decoded.

    The canvas of an extended WebP counts. No decoder opens one whose frame has another size.
    """
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        assert zlib.crc32(data[12:29]) == int.from_bytes(data[29:33], "big")
        return struct.unpack_from(">II", data, 16)
    if data[:4] != b"RIFF":
        return None
    kind, chunk = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(chunk[4:7], "little"), 1 + int.from_bytes(chunk[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(chunk[1:5], "little")
        return 1 + bits % 2**14, 1 + (bits >> 14) % 2**14
    width, height = struct.unpack_from("<HH", chunk, 6)
    return width % 2**14, height % 2**14


@pytest.mark.parametrize("seed", range(3))
def test_invented_headers_survive(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    starts = [data[: rng.randrange(4, 40)] for _, data in CORPUS] + [b"", b"RIFF", b"\xff\xd8\xff", b"BM", b"GIF89a"]
    files = [(f"{i}.png", start + rng.randbytes(rng.randrange(200))) for i, start in enumerate(starts)]
    scan = read_sizes(write(tmp_path, files))
    for i, (_, data) in enumerate(files):
        expected = pillow_size(data)
        if expected is not None:
            assert tuple(scan.sizes[i]) == expected


def test_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose header claims gigabytes costs a few kilobytes of reading."""
    asked, came = [], []

    def counted(real: Callable[..., bytes], asked: list[int]) -> Callable[..., bytes]:
        def read(fd: int, n: int, *offset: int) -> bytes:
            data = real(fd, n, *offset)
            asked.append(n)
            came.append(len(data))
            return data

        return read

    for name in {"read", "pread"} & set(dir(os)):
        monkeypatch.setattr(os, name, counted(getattr(os, name), asked if name == "read" else []))
    jpeg = b"\xff\xd8" + b"\xff\xe1\xff\xff" + b"Exif\0\0" + bytes(70_000)
    png = dict(CORPUS)["RGB.png"][:33] + (2**31 - 1).to_bytes(4, "big") + b"eXIf" + bytes(9000)
    webp = bytearray(dict(CORPUS)["exif6.webp"])
    at = webp.find(b"EXIF")
    webp[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    for name, data in (("a.jpg", jpeg), ("b.png", png), ("c.webp", bytes(webp))):
        asked.clear()
        came.clear()
        read_sizes(write(tmp_path, [(name, data)]), engine="alone")
        if hasattr(os, "pread"):  # by which all but the beginning comes
            assert sum(asked) <= 80_000, name
        assert 0 < sum(came) <= 210_000, name
        assert len(came) < 50, name


def test_sniff_knows_the_formats_that_need_plugins() -> None:
    assert sniff(b"\xff\x0a" + bytes(30)) == ImageFormat.JXL
    assert sniff(b"\0\0\0\x18ftypheic" + bytes(20)) == ImageFormat.HEIC
    assert sniff(b"\0\0\0\x18ftypavif" + bytes(20)) == ImageFormat.AVIF


def test_a_missing_plugin_is_named_with_what_to_install(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    try:
        import pillow_jxl  # noqa: F401
    except ImportError:
        reason = read_sizes(write(tmp_path, [("x.jxl", b"\xff\x0a" + bytes(100))])).failures[0][2]
        assert reason == "JXL needs a Pillow plugin: pip install pillow-jxl-plugin"
    else:
        pytest.skip("the plugin is installed")


def test_a_segment_too_short_for_its_exif_mark_is_stepped_over(tmp_path: Path) -> None:
    data = encode(picture(), "JPEG", progressive=True)
    short, comment = b"\xff\xe1\x00\x04Exif\0\0", b"\xff\xfe\x00\x04ab"
    for inserted in (short, comment + short):
        path = tmp_path / "short.jpg"
        path.write_bytes(data[:20] + inserted + data[20:])
        scan = read_sizes([path])
        with Image.open(path) as image:
            assert scan.sizes.tolist() == [list(image.size)]
        assert not scan.failures


def test_sides_beyond_every_image_are_named_and_end_no_scan(tmp_path: Path) -> None:
    header = struct.pack(">4sIIBBBBB", b"IHDR", 0xFFFFFFFF, 5, 8, 2, 0, 0, 0)
    path = tmp_path / "wide.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n\0\0\0\r" + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\1IDATx" + bytes(4)
    )
    good = write(tmp_path, [("good.png", encode(picture(), "PNG"))])
    scan = read_sizes([path, *good])
    assert [i for i, _, _ in scan.failures] == [0]
    assert scan.sizes[1].min() > 0
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(path, "wide.png")
    assert list(TarIndex.build([str(tmp_path / "x.tar")], caption=None).reasons) == [0]


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload


@pytest.mark.parametrize("progressive", [False, True])
def test_segments_in_every_order_before_the_frame(tmp_path: Path, progressive: bool) -> None:
    plain = encode(picture(), "JPEG", progressive=progressive)
    jfif, rest = plain[2:20], plain[20:]
    pieces = [
        jfif,
        segment(0xE1, exif(6)),
        segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(3000)),
        segment(0xFE, b"Exif\0\0II*\0 is only a comment"),
        segment(0xED, b"Photoshop 3.0\0" + plain),
    ]
    files = [
        (f"{k}_{i}.jpg", b"\xff\xd8" + b"".join(order) + rest)
        for k in range(len(pieces) + 1)
        for i, order in enumerate(itertools.permutations(pieces, k))
    ]
    scan = read_sizes(write(tmp_path, files), engine="alone")
    assert not scan.failures
    for i, (name, data) in enumerate(files):
        with Image.open(io.BytesIO(data)) as image:
            assert tuple(scan.sizes[i]) == image.size, name
            assert scan.orientation[i] == image.getexif().get(0x0112, 1), name


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("start", [8, 10, 300])
def test_orientation_wherever_it_stands_among_the_entries(order: str, start: int) -> None:
    rng = random.Random(start)
    lookalike = struct.pack(order + "HHIHH", 0x0112, 3, 1, 8, 0)
    for count in (*range(1, 20), 255, 256, 300):
        place = rng.randrange(count)
        entries = [struct.pack(order + "HHII", 0x9000 + i, 99, 1, rng.randrange(2**32)) for i in range(count)]
        for k in (place - 2, place + 1):
            if 0 <= k < count - 1:  # these bytes across two entries
                both = entries[k][:6] + lookalike + entries[k + 1][6:]
                entries[k : k + 2] = [both[:12], both[12:]]
        orientation = rng.randrange(1, 9)
        entries[place] = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
        mark = b"II*\0" if order == "<" else b"MM\0*"
        head = (mark + struct.pack(order + "I", start)).ljust(start, b"x") + struct.pack(order + "H", count)
        tiff = head + b"".join(entries) + bytes(4) + lookalike
        assert exif_orientation(tiff) == orientation
        without = [entry for i, entry in enumerate(entries) if i != place]
        head = head[:-2] + struct.pack(order + "H", count - 1)
        assert exif_orientation(head + b"".join(without) + bytes(4) + lookalike) == 0
        cut = tiff[: len(head) + 12 * place + 9]
        assert exif_orientation(cut) == 0


def test_a_long_webp_that_is_cut_off_has_no_size_wherever_its_exif_block_lies(tmp_path: Path) -> None:
    last = encode(picture(size=(90, 90)), "WEBP", lossless=True, exif=exif(6, 3000))
    at = last.find(b"EXIF")
    block, body = last[at:], last[30:at]
    first = last[:30] + block + body
    assert len(body) > 8192
    for name, data in (("last", last), ("first", first)):
        files = [(f"{name}{cut}.webp", data[: len(data) - cut]) for cut in (0, 1, 100, len(block) + 1, len(body))]
        assert_equals_pillow(tmp_path, files)
    scan = read_sizes(write(tmp_path, [("a.webp", last), ("b.webp", first)]), engine="alone")
    assert scan.orientation.tolist() == [6, 6]
