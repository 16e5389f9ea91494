"""`kohya-bucket analyze` from the outside."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket import BucketSet, KohyaBuckets
from kohya_bucket.buckets import bucket_set_to_toml
from kohya_bucket.cli import app
from kohya_bucket.cli.subjects import Reading
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache, list_images
from tests.clip_files import make_clip
from tests.pictures import make_pictures


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    for i in range(12):
        size = tuple(int(v) for v in rng.integers(200, 900, 2))
        Image.new("RGB", size, (i * 20, 80, 90)).save(data / ("more" if i % 3 else ".") / f"{i:02}.png")
    (data / "00copy.png").write_bytes((data / "00.png").read_bytes())
    (data / "broken.jpg").write_bytes(b"no image")
    return data


def run(*arguments: object):
    result = CliRunner().invoke(app, ["analyze", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def read(*arguments: object):
    (one,) = json.loads(run(*arguments, "--json").stdout)["datasets"]
    return one


def test_a_folder_in_which_nothing_can_be_read(tmp_path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    assert "Change first: files: 1 unreadable → repair or remove" in run(tmp_path).stdout


def test_one_order_by_harm_for_analysis_doctor_and_page(tmp_path) -> None:
    """What stops a training, what is not trained, what is trained otherwise than meant, and what is worth a look."""
    make_pictures(tmp_path / "data", [(600, 400)] * 40 + [(400, 600)] * 40)
    paths = sorted((tmp_path / "data").glob("*.png"))
    turned = Image.Exif()
    turned[274] = 6
    for number, path in enumerate(paths):
        path.with_suffix(".txt").write_bytes("a cat".encode("utf-16" if number == 7 else "utf-8"))
        if number % 2:
            Image.open(path).save(path, exif=turned)
    paths[0].with_name("copy.png").write_bytes(paths[0].read_bytes())
    (tmp_path / "data" / "copy.txt").write_text("a cat", encoding="utf-8")
    (tmp_path / "data" / "broken.png").write_bytes(paths[0].read_bytes()[:20])
    (tmp_path / "data" / "broken.txt").write_text("a cat", encoding="utf-8")
    config = tmp_path / "c.toml"
    table = {"image_dir": str(tmp_path / "data"), "caption_extension": ".txt"}
    config.write_text(
        "[general]\nenable_bucket = true\nresolution = 512\n[[datasets]]\n[[datasets.subsets]]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    )
    advice = [one for one in read("--config", config, "--hash")["recommendations"] if one["setting"] == "files"]
    harms = ["stops training", "not trained", "harms training", "worth a look"]
    assert [one["harm"] for one in advice] == harms
    assert "1 caption file not in UTF-8" in advice[0]["current"]
    head = next(line for line in run("--config", config).stdout.splitlines() if line.startswith("Change first"))
    assert "1 caption file not in UTF-8" in head
    run("--config", config, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 0 < page.index("1 caption file not in UTF-8") < page.index("1 unreadable") < page.index("40 turned")
    sections = json.loads(CliRunner().invoke(app, ["doctor", str(config), "--json"]).stdout)["sections"]
    found = [one for one in sections[0]["findings"] if one["code"] in ("broken-caption", "left-out", "turned")]
    assert [(one["code"], one["count"]) for one in found] == [("broken-caption", 1), ("left-out", 1), ("turned", 40)]


def test_the_first_line_says_what_is_measured_for(folder) -> None:
    first = run(folder).output.splitlines()[0]
    assert first.startswith("Measured for any model at 512x512, batch size 1; others: --arch")
    first = run(folder, "--arch", "sdxl", "-b", 4).output.splitlines()[0]
    assert first.startswith("Measured for SDXL trainers at 1024x1024, batch size 4;")


def test_json_counts_what_is_there(folder) -> None:
    data = read(folder, "--hash", "--batch-size", 4)
    assert data["images"] == {
        "found": 14, "readable": 13, "broken": 1, "not_listed": 0, "placed": 13, "without_bucket": 0,
        "samples_per_epoch": 13,
    }  # fmt: skip
    assert data["batch_size"] == 4
    assert [b["path"] for b in data["broken"]["listed"]] == [str(folder / "broken.jpg")]
    assert data["duplicates"]["listed"] == [[str(folder / "00.png"), str(folder / "00copy.png")]]
    assert len(data["buckets"]) == len(KohyaBuckets(512).bucket_set)
    assert sum(b["images"] for b in data["buckets"]) == 13


def test_a_dataset_config_brings_images_repeats_and_rules(folder, tmp_path) -> None:
    config = tmp_path / "sets.toml"
    config.write_text(
        f"""
        [[datasets]]
        resolution = 512
        batch_size = 3
        enable_bucket = true
          [[datasets.subsets]]
          image_dir = '{folder}'
          num_repeats = 4
          class_tokens = "x"
        [[datasets]]
        resolution = [768, 512]
          [[datasets.subsets]]
          image_dir = '{folder / "more"}'
          class_tokens = "y"
        """,
        encoding="utf-8",
    )
    report = json.loads(run("--config", config, "--json").stdout)
    first, second = report["datasets"]
    assert first["batch_size"] == 3
    assert first["images"]["found"] == 6
    assert first["images"]["broken"] == 1
    assert first["images"]["samples_per_epoch"] == 5 * 4
    assert first["rule"] == repr(KohyaBuckets(512, 256, 1024))
    assert [(b["width"], b["height"]) for b in second["buckets"]] == [(768, 512)]
    config.write_text(config.read_text("utf-8") + "\n[kohya_bucket]\nswitching = 'geometric'\n", "utf-8")
    assert "switching='geometric'" in json.loads(run("--config", config, "--json").stdout)["datasets"][0]["rule"]
    result = run("--config", config, "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "sets, dataset 1" in page
    assert "sets, dataset 2" in page
    assert "Change first: " in result.stdout


def test_the_text_names_empty_and_rare_buckets_and_comes_with_the_page(tmp_path) -> None:
    for i, size in enumerate([(64, 64)] * 10 + [(96, 64)]):
        Image.new("RGB", size).save(tmp_path / f"{i}.png")
    (tmp_path / "set.toml").write_text(
        bucket_set_to_toml(BucketSet.from_dims([(64, 64), (96, 64), (64, 96)])), encoding="utf-8"
    )
    result = run(tmp_path, "-c", tmp_path / "set.toml", "--html", tmp_path / "r.html")
    text = result.stdout
    assert (tmp_path / "r.html").stat().st_size > 10_000
    assert "1 bucket holds fewer than 10 images: 96x64" in text
    assert "1 bucket holds no image: 64x96" in text
    assert "Lost: 0.00% of an image" in text
    assert "1.000 to 1.500\n" in text
    data = read(tmp_path, "-c", tmp_path / "set.toml")
    assert (data["aspects"]["min"], data["aspects"]["median"], data["aspects"]["max"]) == (1.0, 1.0, 1.5)


def test_the_terminal_report_names_the_broken_file(folder) -> None:
    text = run(folder, "--batch-size", 4, "--hash").stdout
    assert "14 images, 13 of them in " in text
    assert "broken.jpg" in text.replace("\n", "")
    assert "Equal files" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to analyse: name a folder"),
        (("no_such_folder",), "no_such_folder: no such"),
        (("{folder}", "--resolution", "big"), "resolution is 'big'"),
        (("{folder}", "-p", "sdxl", "-c", "x.toml"), "--preset and --bucket-config"),
        (("{folder}", "-p", "sdxxl"), "sdxxl"),
        (("{folder}", "--config", "x.toml"), "x.toml brings its own images and rules"),
        (("--config", "no_config.toml"), "no_config.toml"),
        (("{folder}", "--max-bucket-reso", "448"), "--max-bucket-reso 448"),
        (("{folder}", "--resolution", "1536"), "--max-bucket-reso 1024"),
    ],
)
def test_mistakes_end_with_one_line_and_exit_code_2(folder, command_line, arguments, message) -> None:
    code, output, errors = command_line("analyze", *(a.replace("{folder}", str(folder)) for a in arguments))
    assert (code, output) == (2, "")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_a_lower_resolution_gains_what_was_promised(tmp_path) -> None:
    for i in range(20):
        Image.new("RGB", (700, 720 + 10 * i)).save(tmp_path / f"{i:02}.png")
    Image.new("RGB", (3600, 300)).save(tmp_path / "long.png")
    (apart := tmp_path / "apart").mkdir()
    for options in (["--resolution", 1024], ["--resolution", 1024, "--max-bucket-reso", 2048]):
        advised = read(tmp_path, "--no-recursive", *options)["recommendations"]
        advice = {r["setting"]: r for r in advised}["resolution"]
        (tmp_path / "long.png").rename(apart / "long.png")  # as the advice on files says
        promised = ("--no-recursive", *options, "--resolution", advice["proposed"])
        assert read(tmp_path, *promised)["summary"] == advice["after"]
        (apart / "long.png").rename(tmp_path / "long.png")


def test_the_reports_place_is_looked_at_before_the_images(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kohya_bucket.cli.subjects.from_folders", None)
    (tmp_path / "file").write_bytes(b"")
    for place, message in (
        (tmp_path, "a folder: name a file in it"),
        (tmp_path / "file" / "r.html", "there is no folder"),
    ):
        with pytest.raises(KohyaBucketError, match=message):
            run(folder, "--html", place)


def test_a_cache_of_sizes_keeps_what_is_of_other_folders(tmp_path):
    cache = tmp_path / "sizes.parquet"
    for folder, width in (("a", 64), ("b", 96)):
        make_pictures(tmp_path / folder, [(width, 64), (width, 80)])
    for folder, hash in (("a", False), ("b", True), ("a", False)):
        Reading(cache=cache, hash=hash, quiet=True).table(list_images(tmp_path / folder))
        kept = MetadataCache.load(cache)
    assert sorted(kept.sizes[:, 0].tolist()) == [64, 64, 96, 96]
    assert [bool(row.hash) for row in kept] == [True] * 4


def test_broken_clips_are_listed_where_they_are_and_nothing_is_advised_that_passes_them_over(tmp_path, monkeypatch):
    pytest.importorskip("av")
    clip = make_clip(tmp_path / "data" / "whole.mp4", 5, (640, 480)).with_name("broken.mp4")
    clip.write_bytes(b"no clip")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    result = run("data", "--hash", "--list-bad", "lists/bad.txt")
    assert list_images("lists/bad.txt") == [str(clip)]
    assert "--hash: for images alone" in result.output
    assert "1 unreadable → repair or remove\n" in result.output


def test_what_lies_beside_images_is_told(tmp_path, command_line) -> None:
    folder = tmp_path / "data"
    make_pictures(folder, [(600, 600)] * 9, "a caption")
    make_pictures(folder / "more", [(600, 600)] * 3, "a caption")
    (folder / "2.txt").write_bytes("a cat".encode("utf-16"))
    (folder / "3.txt").unlink()
    code, out, _ = command_line("analyze", folder)
    assert code == 0
    assert "3 images lie in subfolders, which a trainer does not search" in out
    assert "1 caption file not in UTF-8, at which a trainer stops" in out
    assert "1 of 12 images has no '.txt' file" in out
