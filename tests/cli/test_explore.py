"""`kohya-bucket explore` without a browser: what it writes, what it opens, what it refuses."""

import json
import re
import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlparse
from urllib.request import url2pathname

import pytest
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.reports import explorer_page
from tests.pictures import make_pictures


def run(*arguments: object):
    return CliRunner().invoke(app, ["explore", *map(str, arguments), "--quiet"])


def start_of(page: Path):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))["start"]


@pytest.fixture
def opened(monkeypatch) -> list[Path]:
    pages: list[Path] = []
    to_path = lambda address: Path(url2pathname(urlparse(address).path))  # noqa: E731
    monkeypatch.setattr(webbrowser, "open", lambda address: pages.append(to_path(address)) or True)
    return pages


def test_without_a_source_an_empty_page_is_opened(opened) -> None:
    assert run().exit_code == 0
    assert start_of(opened[0]) is None


def test_the_images_of_a_folder_are_in_the_page(opened, tmp_path) -> None:
    make_pictures(tmp_path / "d #ä" / "a b", [(40, 30), (30, 40)])
    (tmp_path / "d #ä" / "broken.png").write_bytes(b"no image")
    Image.new("L", (20, 10)).save(tmp_path / "d #ä" / "moving.gif")
    result = run(tmp_path / "d #ä", "--out", tmp_path / "page.html")
    assert "opens in any browser" in result.output
    assert opened == [tmp_path / "page.html"]
    images = start_of(tmp_path / "page.html")["images"]
    assert images["names"] == ["0.png", "1.png", "broken.png", "moving.gif"]
    assert images["sizes"] == [40, 30, 30, 40, 0, 0, 0, 0]
    assert images["groups"] == [["a b", 1, None, None], ["", 1, None, None]]
    assert "not an image" in images["failures"]["2"]
    assert images["failures"]["3"].startswith("sd-scripts lists no .gif files")
    assert Path(url2pathname(urlparse(images["base"]).path)) == tmp_path / "d #ä"
    assert unquote(images["base"]).endswith("/d #ä/")
    assert images["root"] == (tmp_path / "d #ä").as_posix()


def test_a_config_brings_its_text_and_its_data_sets(opened, tmp_path) -> None:
    make_pictures(tmp_path / "set", [(400, 300)], caption="a cat")
    config = tmp_path / "c.toml"
    config.write_text(
        f"# mine\n[[datasets]]\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'none'}'\n"
        "[[datasets]]\nresolution = 512\nenable_bucket = true\nbatch_size = 2\n"
        f"[[datasets.subsets]]\nimage_dir = '{tmp_path / 'set'}'\nnum_repeats = 3\n",
        encoding="utf-8",
    )
    result = run(config, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "error: " in result.output  # of the first dataset, as analyze says it
    start = start_of(tmp_path / "page.html")
    assert start["config"] == {"name": "c.toml", "text": config.read_text(encoding="utf-8")}
    assert start["dataset"] == 1
    assert start["images"]["groups"] == [["", 3, [1]]]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--no-open"], "--no-open without --out would show nothing"),
        (["{}", "--out", "{}"], ", a folder: "),
        (["{}", "--out", "{}/x.png"], "named as an image, but a web page is written"),
        (["{}/nothing"], "no such file"),
        (["{}/c.json"], "the explorer takes dataset configs in TOML"),
        (["{}/x.tar"], "x.tar: nothing to show: x.tar: not an image"),
        (["{}/set"], "has 1 images, but the explorer shows 0 at most"),
    ],
)
def test_what_cannot_be_is_refused(opened, tmp_path, monkeypatch, arguments, why) -> None:
    make_pictures(tmp_path / "set", [(40, 30)])
    datasets = [{"resolution": 512, "subsets": [{"image_dir": str(tmp_path / "set")}]}]
    (tmp_path / "c.json").write_text(json.dumps({"datasets": datasets}), encoding="utf-8")
    (tmp_path / "x.tar").write_bytes(b"a tar")
    monkeypatch.setattr(explorer_page, "MOST_IMAGES", 0)
    result = run(*(a.format(tmp_path) for a in arguments))
    assert why in str(result.exception)
    assert opened == []


def test_where_there_is_no_browser_the_file_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    assert "open that file in one" in run("--out", tmp_path / "page.html").output


def settings_of(page: Path):
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))["settings"]


def test_a_preset_of_the_gui_brings_its_folders_and_its_settings(opened, tmp_path) -> None:
    make_pictures(tmp_path / "img" / "5_cat", [(400, 300)], caption="a cat")
    make_pictures(tmp_path / "img" / "2_dog", [(400, 300)] * 2)
    preset = {"LoRA_type": "Standard", "max_resolution": "768,512", "train_batch_size": 3, "enable_bucket": True}
    preset |= {"train_data_dir": str(tmp_path / "img"), "max_bucket_reso": "2048", "bucket_no_upscale": True}
    (tmp_path / "preset.json").write_text(json.dumps(preset), encoding="utf-8")
    result = run(tmp_path / "preset.json", "--output", tmp_path / "page.html")
    assert result.exit_code == 0, result.exception
    groups = start_of(tmp_path / "page.html")["images"]["groups"]
    assert sorted(groups) == [["2_dog", 2, [0]], ["5_cat", 5, [0]]]
    assert settings_of(tmp_path / "page.html") == {
        "resolution": [768, 512], "min": 256, "max": 2048, "steps": 64, "batch": 3, "noUpscale": True,
        "buckets": "kohya",
    }  # fmt: skip
    given = start_of(tmp_path / "page.html")["config"]
    assert given == {"name": "preset.json", "text": json.dumps(preset)}
    preset = {key: value for key, value in preset.items() if key != "train_data_dir"}
    (tmp_path / "own.toml").write_text(
        f"[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'img' / '5_cat'}'\n",
        encoding="utf-8",
    )
    (tmp_path / "named.json").write_text(json.dumps(preset | {"dataset_config": str(tmp_path / "own.toml")}))
    assert run(tmp_path / "named.json", "-o", tmp_path / "page.html").exit_code == 0
    assert start_of(tmp_path / "page.html")["config"]["name"] == "own.toml"


def test_a_page_begins_at_the_model_or_resolution_that_is_named(opened, tmp_path) -> None:
    make_pictures(tmp_path / "img", [(400, 300)])
    for source in ([], [tmp_path / "img"]):
        run(*source, "--arch", "sdxl", "-o", tmp_path / "page.html")
        assert settings_of(tmp_path / "page.html") | {"resolution": [1024, 1024], "max": 2048} == settings_of(
            tmp_path / "page.html"
        )
        run(*source, "--resolution", "640,512", "-o", tmp_path / "page.html")
        assert settings_of(tmp_path / "page.html")["resolution"] == [640, 512]
    (tmp_path / "c.toml").write_text(
        f"[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'img'}'", encoding="utf-8"
    )
    result = run(tmp_path / "c.toml", "--resolution", "640", "-o", tmp_path / "page.html")
    assert "brings its own resolution" in str(result.exception)


def test_a_config_is_judged_by_the_model_that_is_named(opened, tmp_path) -> None:
    make_pictures(tmp_path / "img", [(400, 300)])
    text = "[[datasets]]\nresolution = 512\nenable_bucket = true\nbucket_reso_steps = 8\n[[datasets.subsets]]\n"
    (tmp_path / "c.toml").write_text(f"{text}image_dir = '{tmp_path / 'img'}'", encoding="utf-8")
    said = [run(tmp_path / "c.toml", "--arch", arch, "-o", tmp_path / "page.html") for arch in ("sd15", "flux")]
    assert ["refused by SD 1.5 trainers" in result.stderr for result in said] == [True, False]
