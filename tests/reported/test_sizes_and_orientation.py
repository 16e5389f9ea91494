"""Sizes and orientation: one answer for the bucket and for the pixels."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from kohya_bucket.images import list_images, read_sizes
from tests.command_line import Command
from tests.reported.case import reported

_CONFIG = """
[general]
resolution = 512
enable_bucket = true
caption_extension = ".txt"
[[datasets]]
[[datasets.subsets]]
image_dir = '{}'
"""


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()  # with the mark that JPEG files have before it


def two_segments(path: Path) -> None:
    Image.new("RGB", (760, 538)).save(path, "JPEG")
    data, block = path.read_bytes(), exif(6)
    parts = (block[:20], b"Exif\0\0" + block[20:])
    path.write_bytes(data[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(p) + 2) + p for p in parts) + data[2:])


def in_png(path: Path, before: bytes = b"", after: bytes = b"") -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (538, 760), dtype=np.uint8)).save(path, "PNG")
    data = path.read_bytes()
    path.write_bytes(data[:33] + before + data[33:-12] + after + data[-12:])


def raw_profile(path: Path) -> None:
    lines = f"\nexif\n{len(exif(6)):8}\n{exif(6).hex()}\n".encode()
    in_png(path, before=chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(lines)))


def xmp(path: Path) -> None:
    in_png(path, before=chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>'))


@reported(
    "images that are only turned by their metadata train on their side, or are cut to the wrong bucket",
    "kohya-ss/sd-scripts#1316", "kohya-ss/musubi-tuner#695", "python-pillow/Pillow#4529", "python-pillow/Pillow#6462",
    trainer="Loads the pixels as they are stored, and says nothing of the turn.",
    here="Plans the stored size as the trainer does, and counts what asks for a turn, wherever a file says so; data "
    "sets with `obey_exif=True` choose the bucket for the turned picture.",
    command="kohya-bucket analyze FOLDER",
    origin="Pillow's `ImageOps.exif_transpose`",
)  # fmt: skip
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("two segments.jpg", two_segments),
        ("raw profile.png", raw_profile),
        ("behind the pixels.png", lambda path: in_png(path, after=chunk(b"eXIf", exif(6)[6:]))),
        ("xmp.png", xmp),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_turn_that_metadata_ask_for(tmp_path: Path, command_line: Command, name: str, make) -> None:
    path = tmp_path / name
    make(path)
    with Image.open(path) as image:
        image.load()
        wanted = ImageOps.exif_transpose(image).size
    found = read_sizes([path])
    assert found.upright_sizes().tolist() == [list(wanted)]
    if wanted == (760, 538):
        pytest.skip("this Pillow does not see the turn, so nobody turns it")
    assert (found.sizes.tolist(), found.orientation.tolist()) == ([[760, 538]], [6])
    code, out, _ = command_line("analyze", tmp_path)
    assert code == 0
    assert "a quarter turn clockwise" in out


@reported(
    "ValueError: Decompressed data too large for PngImagePlugin.MAX_TEXT_CHUNK",
    "python-pillow/Pillow#8363", "hiyouga/LlamaFactory#6300",
    trainer="Stops with a traceback when it comes to the image.",
    here="`plan` and `doctor` name it and say what helps; it is left out of training.",
    command="kohya-bucket doctor CONFIG",
    origin="Pillow's own refusal of the file",
)  # fmt: skip
def test_a_png_whose_text_is_larger_than_pillow_reads(tmp_path: Path, command_line: Command) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    in_png(folder / "good.png")
    in_png(folder / "much.png", before=chunk(b"zTXt", b"workflow\0\0" + zlib.compress(bytes(3 << 20))))
    for name in ("good", "much"):
        (folder / f"{name}.txt").write_text("a caption", encoding="utf-8")
    (tmp_path / "c.toml").write_text(_CONFIG.format(folder), encoding="utf-8")
    with pytest.raises(ValueError, match=r"(?i)decompressed data too large"):
        Image.open(folder / "much.png")
    code, out, _ = command_line("doctor", tmp_path / "c.toml")
    assert code == 1
    first = out.splitlines()[0]
    assert first == "nothing found that would stop the training, 1 that would stop sd-scripts without kohya_bucket, " \
        "0 problems that would harm it"  # fmt: skip
    assert "its text or profile is larger than Pillow reads" in out
    assert "what to do: save it without its text" in out


@reported(
    "DecompressionBombError: Image size exceeds limit of 178956970 pixels",
    "lyuwenyu/RT-DETR#337", "open-edge-platform/geti_v2#1486",
    trainer="Stops with a traceback when it comes to the image.",
    here="`plan` and `doctor` name it before, and say to make it smaller.",
    command="kohya-bucket doctor CONFIG",
    origin="Pillow's own limit",
)  # fmt: skip
def test_an_image_of_more_pixels_than_pillow_opens(tmp_path: Path, command_line: Command) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    in_png(folder / "good.png")
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0))
    (folder / "large.png").write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))
    (tmp_path / "c.toml").write_text(_CONFIG.format(folder), encoding="utf-8")
    code, out, _ = command_line("doctor", tmp_path / "c.toml", "--quick")
    assert code == 1
    assert "more than 178,956,970 pixels" in out
    assert "what to do: make it smaller" in out


@reported(
    "hidden files such as ._a.png or .ipynb_checkpoints in the image folder are trained, or end the training",
    "bghira/SimpleTuner#94", "hako-mikan/sd-webui-traintrain#26", "deepfakes/faceswap-playground#116",
    trainer="Leaves out every name that begins with a dot.",
    here="So does every command and every dataset, in subfolders and in `__MACOSX` too.",
    command="kohya-bucket analyze FOLDER",
    origin="`glob_images` of sd-scripts v0.11.1 and musubi-tuner v0.3.4, run on the same folder",
)  # fmt: skip
def test_hidden_files_are_no_images(tmp_path: Path, command_line: Command) -> None:
    for name in ("a.png", "sub/b.png", "._a.png", ".ipynb_checkpoints/a-checkpoint.png", "__MACOSX/sub/._b.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        in_png(tmp_path / name)
    wanted = [str(tmp_path / "a.png"), str(tmp_path / "sub" / "b.png")]
    assert list_images(tmp_path) == wanted
    for arguments in (("analyze", tmp_path), ("compare", tmp_path)):
        code, out, _ = command_line(*arguments)
        assert code == 0
        assert "2 images" in out
