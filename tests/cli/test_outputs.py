"""What commands must not write over, and outputs that cannot be written."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.cli import app, main
from kohya_bucket.errors import KohyaBucketError
from tests.pictures import png_header


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "sizes", "{data}", "--output", "{image}"),
        ("buckets", "make", "{data}", "--output", "{image}"),
        ("analyze", "{data}", "--html", "{image}"),
        ("buckets", "chart", "{data}", "--output", "{image}"),
        ("simulate", "{image}", "--preview", "{image}"),
    ],
)
def test_no_image_of_the_data_is_written_over(folder: Path, arguments: tuple[str, ...]) -> None:
    image = folder / "0.png"
    before = image.read_bytes()
    result = CliRunner().invoke(app, [a.format(data=folder, image=image) for a in arguments])
    assert isinstance(result.exception, KohyaBucketError)
    assert "give another name" in str(result.exception)
    assert image.read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("analyze", "{data}", "--html"), "report.html"),
        (("analyze", "{data}", "--list-bad"), "bad.txt"),
        (("explore", "{data}", "--no-open", "--out"), "page.html"),
        (("buckets", "chart", "--preset", "sdxl", "--output"), "chart.svg"),
        (("simulate", "640x480", "--preview"), "preview.png"),
        (("simulate", "640x480", "--preview"), "preview.jpg"),
    ],
)
def test_a_page_or_a_picture_replaces_its_like_only(folder: Path, arguments: tuple[str, ...], name: str) -> None:
    output = folder.parent / name
    command = [*(a.format(data=folder) for a in arguments), str(output)]
    before = b"[kohya_bucket]\n" if output.suffix == ".html" else (folder / "0.png").read_bytes()
    output.write_bytes(before)
    result = CliRunner().invoke(app, command)
    assert "would be overwritten: give another name" in str(result.exception)
    assert output.read_bytes() == before
    output.unlink()
    for _ in range(2):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.exception


def test_no_table_or_list_is_written_over(folder: Path) -> None:
    paths, sizes = folder / "paths.txt", folder / "sizes.csv"
    paths.write_text("0.png\n1.png\n", encoding="utf-8")
    sizes.write_text("id,width,height\na,300,400\n", encoding="utf-8")
    for command, file in (("cache sizes", paths), ("buckets make", sizes)):
        before = file.read_bytes()
        result = CliRunner().invoke(app, [*command.split(), str(file), "--output", str(file)])
        assert "which is also an input and would be overwritten" in str(result.exception)
        assert file.read_bytes() == before


@pytest.mark.parametrize("command", ["cache sizes", "buckets make"])
def test_a_folder_is_no_file_to_write(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("kohya_bucket.images.read_sizes", None)  # it is said before an image is read
    result = CliRunner().invoke(app, [*command.split(), str(folder), "--output", str(folder)])
    assert isinstance(result.exception, KohyaBucketError)
    assert str(result.exception) == f"--output is {folder}, a folder: name a file in it"


def test_json_stays_json_with_a_preview(folder: Path) -> None:
    preview = folder.parent / "preview.png"
    result = CliRunner().invoke(app, ["simulate", "576x768", "--json", "--preview", str(preview)])
    assert json.loads(result.stdout)[0]["bucket"] == {"width": 448, "height": 576}
    assert preview.is_file()


def test_a_preview_of_which_less_than_a_pixel_is_kept(folder: Path) -> None:
    preview = folder.parent / "preview.png"
    result = CliRunner().invoke(app, ["simulate", "100000x10", "--preview", str(preview)])
    assert result.exception is None
    with Image.open(preview) as image:
        assert image.size == (1024, 1)


def test_a_preview_of_an_image_whose_pixels_are_damaged(folder: Path) -> None:
    (image := folder / "damaged.png").write_bytes(png_header(300, 400).replace(b"IEND", b"\0\1\2\3"))
    result = CliRunner().invoke(app, ["simulate", str(image), "--preview", str(folder.parent / "preview.png")])
    assert isinstance(result.exception, KohyaBucketError)
    assert str(image) in str(result.exception)


def test_a_preview_says_its_bucket_and_what_is_cut_off(folder: Path) -> None:
    preview = folder.parent / "preview.png"
    result = CliRunner().invoke(app, ["simulate", "1920x1080", "--preview", str(preview)])
    assert "preview of 640x384, 6.3% cut off, in" in result.output
    with Image.open(preview) as image:
        ground = [image.getpixel((x, image.height - 3)) for x in range(2, 60)]
    assert set(ground) == {(0x16, 0x18, 0x1A)}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_standard_output_on_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kohya_bucket", "buckets", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("kohya-bucket: the disk is full")
    assert "Traceback" not in done.stderr


def test_sizes_build_replaces_no_file_of_another_kind(folder: Path) -> None:
    output = folder.parent / "notes.txt"
    build = ["cache", "sizes", str(folder), "--output", str(output)]
    output.write_text("to be kept", encoding="utf-8")
    result = CliRunner().invoke(app, build)
    assert str(output) in str(result.exception)
    assert output.read_text(encoding="utf-8") == "to be kept"
    output.unlink()
    for _ in range(2):  # one of ours is replaced
        assert CliRunner().invoke(app, build).exit_code == 0
    output.write_bytes(b"")  # nothing is lost with an empty one
    assert CliRunner().invoke(app, build).exit_code == 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"width": [1], "height": [2]}), output)
    assert str(output) in str(CliRunner().invoke(app, build).exception)


@pytest.mark.parametrize("text", ["[[datasets]]\nresolution = 512\n", "[[buckets]]\nwidth = 512\nheight = 512\n"])
def test_a_bucket_set_replaces_only_one_that_was_made_here(folder: Path, text: str) -> None:
    by_hand, own = folder / "my.toml", folder / "set.toml"
    by_hand.write_text(text, encoding="utf-8")
    for _ in range(2):
        assert CliRunner().invoke(app, ["buckets", "make", str(folder), "--output", str(own)]).exit_code == 0
    result = CliRunner().invoke(app, ["buckets", "make", str(folder), "--output", str(by_hand)])
    assert str(by_hand) in str(result.exception)
    assert by_hand.read_text(encoding="utf-8") == text


def test_compare_names_what_can_be_compared(folder: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(folder), "--rules", "kohya,onetrainr"])
    assert "rule is 'onetrainr'" in str(result.exception)
    assert "onetrainer" in str(result.exception)
    assert "--rules is ','" in str(CliRunner().invoke(app, ["compare", str(folder), "--rules", ","]).exception)
    assert CliRunner().invoke(app, ["compare", str(folder), "--rules", "kohya, "]).exit_code == 0


@pytest.mark.parametrize("command", ["compare", "analyze", "buckets chart"])
def test_a_largest_side_of_nothing_is_no_default(folder: Path, command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), str(folder), "--max-bucket-reso", "0"])
    assert "--max-bucket-reso is 0" in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ("analyze", "{data}", "--html"),
        ("analyze", "{data}", "--list-bad"),
        ("analyze", "{data}", "--cache"),
        ("buckets", "chart", "--output"),
        ("buckets", "make", "{data}", "--output"),
        ("explore", "{data}", "--no-open", "--out"),
        ("simulate", "576x768", "--preview"),
        ("cache", "sizes", "{data}", "--output"),
    ],
)
def test_no_folder_is_made_for_a_file(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder.parent / "reports").mkdir()
    words = [a.format(data=folder) for a in arguments]
    result = CliRunner().invoke(app, [*words, str(folder.parent / "repotrs" / "out.svg")])
    assert isinstance(result.exception, KohyaBucketError)
    assert f"'{folder.parent / 'reports'}'?" in str(result.exception)
    assert not (folder.parent / "repotrs").exists()


@pytest.mark.parametrize("options", [("--html", "--list-bad"), ("--html", "--cache"), ("--cache", "--list-bad")])
def test_two_outputs_are_not_one_file(folder: Path, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    one, other = options
    result = CliRunner().invoke(app, ["analyze", str(folder), one, "out", other, str(folder.parent / "out")])
    assert isinstance(result.exception, KohyaBucketError)
    assert f"{one} and {other} both name" in str(result.exception)
    assert not Path("out").exists()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437"])
def test_drawings_are_plain_where_the_output_cannot_show_them(
    folder: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A redirected output has the system's code page on Windows; names it lacks are escaped."""
    (folder / "0.png").rename(folder / "ж.png")
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.argv", ["kohya-bucket", "analyze", str(folder), "--preset", "sdxl"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    out.flush()
    text = out.buffer.getvalue().decode(encoding)
    assert "######" in text or "██████" in text
    assert "\\u25" not in text
    assert "\\u2192" not in text
    assert "\\u0436.png" in text


@pytest.mark.posix("Windows has no such signal of a closed pipe")
def test_a_reader_that_has_enough_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "kohya_bucket", "buckets", "list"], stdout=out, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_no_folder_is_made_of_an_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path has one slash where an address has two."""
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["cache", "sizes", str(folder), "--output", "s3://bucket/sizes.parquet"])
    assert isinstance(result.exception, KohyaBucketError)
    assert "--output is s3://bucket/sizes.parquet, but is written to this machine only" in str(result.exception)
    assert not (folder / "s3:").exists()
