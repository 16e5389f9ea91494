"""Files of a folder mended or set aside: what trainers then read is right, and undoing brings back every byte."""

import errno
import hashlib
import io
import json
import math
import os
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import mend_log, mending
from kohya_bucket.images.mending import Mend
from tests.command_line import Command, command_line  # noqa: F401

SIZES = [(320, 208), (208, 320), (131, 97), (256, 256), (99, 140), (200, 66), (640, 400), (77, 401)]


def picture(draw: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    small = draw.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def ugly(tmp_path: Path) -> Path:
    """Several hundred pictures: turned, of other colours and depths, animated, misnamed, damaged, doubled, tiny."""
    folder = tmp_path / "10_Jörg's cats"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for k, size in enumerate(SIZES):
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[0x112] = orientation
            for ending in ("jpg", "png", "webp"):
                image = picture(draw, size)
                image = image.convert("L") if k == 3 and ending != "webp" else image
                image = image.convert("CMYK") if k == 4 and ending == "jpg" else image
                options: dict[str, Any] = {"icc_profile": b"a profile of colours"} if k == 5 else {}
                image.save(folder / f"{k}_{orientation}_{ending}.{ending}", exif=exif, **options)
        deep = np.linspace(0, 65535, size[0] * size[1]).reshape(size[::-1]).astype(np.uint16)
        Image.fromarray(deep).save(folder / f"deep {k}.png")
        picture(draw, size).convert("CMYK").save(folder / f"cmyk {k}.tif")
        picture(draw, size).save(folder / f"moves {k}.gif", save_all=True, append_images=[picture(draw, size)])
        picture(draw, size).save(folder / f"wrong {k}.png", "JPEG")
        picture(draw, size).save(folder / f"case {k}.Jpg")
        whole = (folder / f"{k}_1_jpg.jpg").read_bytes()
        (folder / f"cut {k}.jpg").write_bytes(whole[: len(whole) // 2])
        (folder / f"no image {k}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
        shutil.copy2(folder / f"{k}_1_png.png", folder / f"copy {k}.png")
        picture(draw, (40 + k, 200)).save(folder / f"tiny {k}.webp")
    texts = {"8": "a plain text", "1252": "café".encode("cp1252"), "16": "猫".encode("utf-16"), "sig": "\ufeffred"}
    for k, path in enumerate(sorted(folder.iterdir())):
        text = list(texts.values())[k % 4]
        path.with_suffix(".txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def bytes_of(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        path.relative_to(folder).as_posix(): (hashlib.sha1(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def fixed(folder: Path) -> mending.FolderLook:
    found = mending.find(str(folder))
    outcome = mend_log.apply(str(folder), found.fixes, "cp1252")
    assert not outcome.failed
    assert outcome.done == len(found.fixes)
    return found


@pytest.mark.weekly
def test_what_is_ugly_is_mended_planned_without_a_finding_and_undone(ugly: Path, command_line: Command) -> None:  # noqa: F811
    before = bytes_of(ugly)
    pixels = {path.name: np.asarray(Image.open(path).convert("RGB")) for path in ugly.glob("*_jpg.jpg")}
    found = fixed(ugly)
    counts = Counter(fix.mends[0] for fix in found.fixes)
    assert counts == {
        Mend.TURNED: 7 * 3 * 8, Mend.EIGHT_BITS: 8, Mend.CONVERTED: 16, Mend.RENAMED: 16, Mend.BROKEN: 16,
        Mend.TINY: 8, Mend.COPY: 8, Mend.CAPTION: counts[Mend.CAPTION], Mend.ALONG: 32,
    }  # fmt: skip
    assert counts[Mend.CAPTION] > 100
    assert not found.left
    assert not mending.find(str(ugly)).fixes

    for name, old in pixels.items():  # JPEG lose a little
        orientation = int(name.split("_")[1])
        exif = Image.Exif()
        exif[0x112] = orientation
        was = Image.open(io.BytesIO(_png(old, exif)))
        with Image.open(ugly / name) as image:
            wanted = np.asarray(ImageOps.exif_transpose(was), np.int16)
            got = np.asarray(image.convert("RGB"), np.int16)
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).mean() < 2, name
    for k in range(8):
        levels = np.asarray(Image.open(ugly / f"deep {k}.png").convert("RGB"))
        assert levels.mean() == pytest.approx(127, abs=1)

    (ugly.parent / "c.toml").write_text(
        "[general]\nresolution = 256\nenable_bucket = true\ncaption_extension = '.txt'\nmin_bucket_reso = 64\n"
        "[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 1\n"
        f"image_dir = {json.dumps(str(ugly))}\n",
        encoding="utf-8",
    )
    code, out, errors = command_line("plan", ugly.parent / "c.toml", "--json")
    assert (code, errors) == (0, "")
    plan = json.loads(out)
    assert plan["findings"] == []
    images = sum(path.is_file() and path.suffix != ".txt" for path in ugly.iterdir())
    assert sum(row["images"] for row in plan["datasets"][0]["buckets"]) == images

    outcome = mend_log.undo(str(ugly))
    assert not outcome.failed
    assert bytes_of(ugly) == before


def _png(pixels: np.ndarray, exif: Image.Exif) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", exif=exif)
    return out.getvalue()


@pytest.fixture
def few(tmp_path: Path) -> Path:
    folder = tmp_path / "few"
    folder.mkdir()
    draw = np.random.default_rng(1)
    exif = Image.Exif()
    exif[0x112] = 6
    picture(draw, (128, 96)).save(folder / "turned.png", exif=exif)
    picture(draw, (128, 96)).save(folder / "a.gif")
    picture(draw, (128, 96)).save(folder / "b.png", "JPEG")
    picture(draw, (128, 16)).save(folder / "tiny.png")
    for name in ("turned", "a", "b", "tiny"):
        (folder / f"{name}.txt").write_bytes("café".encode("cp1252"))
    return folder


def test_what_was_changed_since_or_took_a_name_stays(few: Path) -> None:
    before = bytes_of(few)
    fixed(few)
    Image.new("RGB", (64, 64)).save(few / "turned.png")
    mine = (few / "turned.png").read_bytes()
    (few / "a.gif").write_bytes(b"another")
    mended = (few / "a.png").read_bytes()
    outcome = mend_log.undo(str(few))
    assert (few / "a.png").read_bytes() == mended
    assert sorted(Path(path).name for path, _ in outcome.failed) == ["a.gif", "turned.png"]
    assert (few / "turned.png").read_bytes() == mine
    assert (few / "a.gif").read_bytes() == b"another"
    (few / "a.gif").unlink()
    (few / "turned.png").unlink()
    assert not mend_log.undo(str(few)).failed
    assert bytes_of(few) == before


def test_a_renamed_file_that_was_edited_since_keeps_its_name_and_that_is_said(few: Path) -> None:
    fixed(few)
    (few / "b.jpg").write_bytes(b"edited")
    ((path, why),) = mend_log.undo(str(few)).failed
    assert (Path(path).name, "was changed since: it keeps its new name" in why) == ("b.png", True)
    assert (few / "b.jpg").read_bytes() == b"edited"


def test_an_interrupt_says_how_many_were_fixed_and_how_to_put_them_back(few: Path) -> None:
    look = mending.find(str(few))

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=f"after 2 of {len(look.fixes)} files.*--undo puts it back"):
        mend_log.apply(str(few), look.fixes, "cp1252", interrupt)
    assert mend_log.undo(str(few)).done == 2


def test_an_interrupt_before_the_first_change_leaves_nothing_to_put_back(few: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"interrupted after 0 of \d+ files$"):
        mend_log.apply(str(few), mending.find(str(few)).fixes, "cp1252", interrupt)
    with pytest.raises(KohyaBucketError, match="holds no run to undo"):
        mend_log.undo(str(few))


def test_what_is_left_changed_is_named(few: Path) -> None:
    fixed(few)
    (few / "b.png").write_bytes(b"another where the renamed file was")
    (kept,) = (few / ".set-aside/1").glob("*-turned.png.aside")
    kept.unlink()
    for _ in range(2):  # said until it is seen to
        outcome = mend_log.undo(str(few))
        assert sorted(Path(path).name for path, _ in outcome.failed) == ["b.png", "turned.png"]
    (few / "b.png").unlink()
    assert [Path(path).name for path, _ in mend_log.undo(str(few)).failed] == ["turned.png"]
    assert (few / "b.png").read_bytes()[:2] == b"\xff\xd8"


def test_a_name_that_is_taken_after_the_look_stays_its_owners(few: Path) -> None:
    before, found = bytes_of(few), mending.find(str(few))
    (few / "a.png").write_bytes(b"saved meanwhile")
    outcome = mend_log.apply(str(few), found.fixes, "cp1252")
    assert [Path(path).name for path, _ in outcome.failed] == ["a.gif"]
    assert (few / "a.png").read_bytes() == b"saved meanwhile"
    assert not mend_log.undo(str(few)).failed
    assert (few / "a.png").read_bytes() == b"saved meanwhile"
    (few / "a.png").unlink()
    assert bytes_of(few) == before


def test_a_fault_that_may_pass_sets_nothing_aside(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (few / "cut.jpg").write_bytes(b"\xff\xd8\xff" + bytes(50))
    whole = mending.read_input

    def failing(path: Any, limit: int) -> bytes:
        if Path(path).name == "cut.jpg":
            raise OSError(errno.EIO, "Input/output error")
        return whole(path, limit)

    monkeypatch.setattr(mending, "read_input", failing)
    found = mending.find(str(few))
    assert [Path(path).name for path, _ in found.left] == ["cut.jpg"]
    assert not [fix for fix in found.fixes if "cut" in fix.path]
    monkeypatch.undo()
    assert [fix.mends for fix in mending.find(str(few)).fixes if "cut" in fix.path] == [(Mend.BROKEN,)]


def test_names_and_captions_that_are_taken_are_left_and_said(few: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(few / "a.png")
    (few / "b.caption").write_bytes(b"\x81\x98")
    found = mending.find(str(few))
    assert [Path(path).name for path, _ in found.left] == ["a.gif", "b.caption"]
    assert "a.png" in found.left[0][1]
    assert "--captions-in" in found.left[1][1]
    found = mending.find(str(few), encoding="cp437")
    assert [Path(path).name for path, _ in found.left] == ["a.gif"]


SAMPLES = {
    "gb18030": ["一个女孩", "1girl, 一个穿红色连衣裙的女孩站在海边", "狗", "风景照片，山和湖"],
    "big5": ["一個女孩", "穿紅色洋裝的女孩站在海邊", "貓", "1girl, 長髮, 微笑"],
    "cp949": ["한 소녀", "바닷가에 서 있는 소녀", "고양이", "1girl, 긴 머리, 미소", "꽃"],
    "cp932": ["女の子", "赤いドレスを着た少女が海辺に立っている", "猫", "1girl, 長い髪, 笑顔"],
    "cp1251": ["девушка", "Девушка в красном платье", "1girl, длинные волосы", "я"],
    "koi8-r": ["девушка", "Девушка в красном платье", "1girl, длинные волосы"],
    "cp1250": ["dziewczyna z łąką, żółć", "dívka s květinou", "holčička", "szép lány őszi kertben"],
    "cp1254": ["kız çocuğu, güzel gözlü"],
    "cp1253": ["κορίτσι στην παραλία"],
}
WESTERN = {
    "cp1252": ["café", "une fille à la plage, très belle, cheveux châtains", "été en forêt, l’île", "ÉTÉ À LA PLAGE",
               "niña con flor en el jardín", "coração de uma moça", "ragazza più bella, è così",
               "it’s a “cat” – 20° warm",
               "pige på stranden, blå kjole"],
    "latin-1": ["garçon âgé, école", "Käse und Brötchen über München, Straße"],
}  # fmt: skip


@pytest.mark.parametrize("page", [*SAMPLES, *WESTERN])
def test_a_code_page_is_guessed_where_no_other_fits_and_else_its_readings_are_said(
    tmp_path: Path,
    command_line: Command,  # noqa: F811
    page: str,
) -> None:
    texts = (SAMPLES | WESTERN)[page]
    for number, text in enumerate(texts):
        for folder in ("all", str(number)):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("RGB", (64, 64)).save(tmp_path / folder / f"{number}.png")
            (tmp_path / folder / f"{number}.txt").write_bytes(text.encode(page))
    folders = sorted(path.name for path in tmp_path.iterdir())
    for folder in folders:
        here = [int(folder)] if folder.isdigit() else range(len(texts))
        files = {number: tmp_path / folder / f"{number}.txt" for number in here}
        before = {number: file.read_bytes() for number, file in files.items()}
        for file in sorted(tmp_path.glob(f"{folder}/*.png"))[1:]:
            file.write_bytes(file.read_bytes() + file.name.encode())  # no copies
        code, _, errors = command_line("fix", tmp_path / folder, "--apply")
        if page in WESTERN:
            assert (code, errors) == (0, "")
            assert {number: file.read_text(encoding="utf-8") for number, file in files.items()} == dict(
                zip(here, (texts[number] for number in here), strict=True)
            )
            continue
        assert code == 1
        assert {number: file.read_bytes() for number, file in files.items()} == before
        for number, file in files.items():
            (line,) = (line for line in errors.splitlines() if str(file) in line)
            assert f"{texts[number][:40]!r} in {page}" in line
            assert "no code page is guessed" in line
        assert command_line("fix", tmp_path / folder, "--apply", "--captions-in", page)[0] == 0
        assert [file.read_text(encoding="utf-8") for file in files.values()] == [texts[number] for number in here]


def test_one_text_of_central_europe_is_said_in_both_ways(few: Path) -> None:
    (few / "a.txt").write_bytes("très belle".encode("cp1252"))
    for name in ("b.txt", "turned.txt"):
        (few / name).unlink(missing_ok=True)
    ((_, why),) = (one for one in mending.find(str(few)).left if one[0].endswith("a.txt"))
    assert "'très belle' in cp1252 or 'trčs belle' in cp1250" in why


def test_the_command(few: Path, command_line: Command) -> None:  # noqa: F811
    before = bytes_of(few)
    code, out, errors = command_line("fix", few)
    assert (code, errors) == (0, "")
    assert "nothing is changed yet: --apply does it for 8 files" in out
    assert "read as cp1252; if these look wrong: --captions-in cp932" in out
    assert bytes_of(few) == before
    assert "\n8 files fixed" in command_line("fix", few, "--apply")[1]
    assert "nothing to fix" in command_line("fix", few)[1]
    assert command_line("fix", few, "--undo")[1].startswith("8 files put back")
    assert bytes_of(few) == before
    code, _, errors = command_line("fix", few, "--undo")
    assert code == 2
    assert "no run to undo" in errors
    assert "--apply and --undo" in command_line("fix", few, "--undo", "--apply")[2]
    for codec in ("klingon", "rot13", "base64", "a\0b"):
        assert "an encoding of text" in command_line("fix", few, "--captions-in", codec)[2]
    assert "no such folder" in command_line("fix", few / "none")[2]


def test_a_turned_png_keeps_what_it_was_made_from(few: Path) -> None:
    exif, text = Image.Exif(), PngInfo()
    exif[0x112] = 3
    text.add_text("parameters", "a cat, Steps: 20")
    text.add_itxt("prompt", "猫", "ja")
    text.add_text("XML:com.adobe.xmp", '<x tiff:Orientation="3"/>')
    Image.new("RGB", (96, 64)).save(few / "made.png", exif=exif, pnginfo=text)
    fixed(few)
    with Image.open(few / "made.png") as image:
        image.load()
        assert image.info["parameters"] == "a cat, Steps: 20"
        assert (image.text["prompt"], image.text["prompt"].lang) == ("猫", "ja")
        assert image.getexif().get(0x112, 1) == 1


@pytest.mark.posix("links that anybody may make")
def test_what_links_lead_to_stays(few: Path) -> None:
    pool = few.parent / "pool"
    pool.mkdir()
    (few / "turned.png").rename(pool / "turned.png")
    (few / "turned.png").symlink_to("../pool/turned.png")
    (few / "sub").mkdir()
    (few / "sub" / "tiny.png").symlink_to("../tiny.png")
    before = bytes_of(few.parent)
    look = mending.find(str(few))
    assert {Path(path).name for path, _ in look.left} == {"turned.png", "tiny.png"}
    assert not {"turned.png", "tiny.png"} & {Path(fix.path).name for fix in look.fixes}
    assert not mend_log.apply(str(few), look.fixes, "cp1252").failed
    assert (few / "turned.png").is_symlink()
    mend_log.undo(str(few))
    assert bytes_of(few.parent) == before


@pytest.mark.posix("a file system that knows case")
def test_an_undo_lists_the_folder_for_none_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / f"é{number}.png")
        (tmp_path / f"é{number}.txt").write_bytes("café".encode("cp1252"))
    assert mend_log.apply(str(tmp_path), mending.find(str(tmp_path)).fixes, "cp1252").done == 9
    (tmp_path / "é3.txt").write_text("changed", encoding="utf-8")
    listed: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(os.fspath(folder)) or listdir(folder))
    for done in (8, 0):
        outcome = mend_log.undo(str(tmp_path))
        assert (outcome.done, [Path(path).name for path, _ in outcome.failed]) == (done, ["é3.txt"])
    assert str(tmp_path) not in listed


@pytest.mark.parametrize("tag", [
    struct.pack("<HHI4s", 0x011A, 2, 3, b"72"), struct.pack("<HHI4s", 0x0103, 6, 1, b"\xff"),
    struct.pack("<HHIi", 0x0100, 9, 1, -5), struct.pack("<HHIf", 0x011A, 11, 1, math.nan),
], ids=["a resolution in text", "a signed byte", "a negative width", "no number"])  # fmt: skip
def test_an_image_whose_exif_pillow_cannot_write_is_named_and_the_others_are_fixed(tmp_path: Path, tag: bytes) -> None:
    orientation = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + b"".join(sorted([tag, orientation])) + bytes(4)
    for name in "abc":
        picture(np.random.default_rng(0), (96, 64 + ord(name))).save(tmp_path / f"{name}.jpg")
    picture(np.random.default_rng(0), (96, 64)).save(tmp_path / "b.jpg", exif=exif)
    (tmp_path / "c.jpg").rename(tmp_path / "c.png")
    before = (tmp_path / "b.jpg").read_bytes()
    outcome = mend_log.apply(str(tmp_path), mending.find(str(tmp_path)).fixes, "cp1252")
    ((path, why),) = outcome.failed
    assert Path(path).name == "b.jpg"
    assert why.startswith("its EXIF cannot be written again (")
    assert (tmp_path / "b.jpg").read_bytes() == before
    assert outcome.done == 1


def test_an_image_whose_exif_pillow_cannot_read_is_named(tmp_path: Path) -> None:
    deep = np.linspace(0, 65535, 80 * 90).reshape(90, 80).astype(np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png", exif=b"II*\0")
    outcome = mend_log.apply(str(tmp_path), mending.find(str(tmp_path)).fixes, "cp1252")
    assert [why.partition(" (")[0] for _, why in outcome.failed] == ["its EXIF cannot be written again"]


def test_of_equal_files_the_copy_is_set_aside(tmp_path: Path) -> None:
    for name in ("portrait 1.jpg", "dup of portrait 1.jpg", "portrait 1 (2).jpg"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)
    found = mending.find(str(tmp_path))
    assert sorted(Path(fix.path).name for fix in found.fixes) == ["dup of portrait 1.jpg", "portrait 1 (2).jpg"]
