"""Lists and control images of musubi-tuner"""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.command_line import Command, command_line  # noqa: F401
from tests.reported.case import reported


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, names in {"img": "ab", "control": "ab", "less": "a"}.items():
        Path(folder).mkdir()
        for name in names:
            picture(f"{folder}/{name}.png")
    for name in "ab":
        Path(f"img/{name}.txt").write_text("a cat", encoding="utf-8")


def picture(path: str) -> None:
    Image.new("RGB", (512, 512)).save(path)


def of_folder(more: str = "") -> str:
    text = "[[datasets]]\nresolution = 512\nenable_bucket = true\nimage_directory = 'img'\ncaption_extension = '.txt'\n"
    Path("m.toml").write_text(text + more, encoding="utf-8")
    return "m.toml"


def of_list(content: str) -> str:
    Path("list.jsonl").write_text(content, encoding="utf-8")
    text = (
        "[[datasets]]\nresolution = 512\nenable_bucket = true\nimage_jsonl_file = 'list.jsonl'\ncache_directory = 'c'\n"
    )
    Path("m.toml").write_text(text, encoding="utf-8")
    return "m.toml"


def found(run: Command, file: str, arch: str) -> list[dict[str, Any]]:
    """The findings of `plan`, with an exit code that fits them, and `doctor`'s."""
    code, out, _ = run("plan", file, "--arch", arch, "--json")
    findings = json.loads(out)["findings"]
    assert code == int(any(one["severity"] == "error" for one in findings))
    doctor, out, _ = run("doctor", file, "--arch", arch, "--json", "--quick")
    assert doctor == code
    assert all(json.dumps(one["message"])[1:-1] in out for one in findings)
    return [{key: one[key] for key in ("code", "message", "names", "count")} for one in findings]


@reported(
    "`Could not find matching control images for … images`",
    "kohya-ss/musubi-tuner#677",
    trainer="stops",
    here="exit code 1, with the folder, the number and two names",
    command="kohya-bucket doctor my.toml --arch qie",
    origin="its `ImageDirectoryDatasource` on 240 made-up folders",
)
def test_missing_control_images(command_line: Command) -> None:  # noqa: F811
    assert found(command_line, of_folder("control_directory = 'control'\n"), "qie") == []
    (gone,) = found(command_line, of_folder("control_directory = 'gone'\n"), "qie")
    assert gone["message"] == "control_directory 'gone' is not a folder, and musubi-tuner stops at that"
    (bare,) = found(command_line, of_folder("control_directory = 'less'\n"), "qie")
    expected = "1 of 2 items without a control image in 'less', at which musubi-tuner stops (img/b.png)"
    assert bare["message"].replace("\\", "/") == expected
    (none,) = found(command_line, of_folder(), "fk")
    assert none["message"].startswith("names no control images, but FLUX.1 Kontext takes one with each image")
    Path("control/b.png").write_bytes(b"no image")
    doctor = command_line("doctor", of_folder("control_directory = 'control'\n"), "--arch", "qie")
    assert "1 image that cannot be" in doctor[1]


@reported(
    "`found 31 images with 1 control images per image` with two in each line, `Not enough control images`",
    "kohya-ss/musubi-tuner#612",
    trainer="reads as many as the family takes: those behind are ignored, and too few end it",
    here="a warning or exit code 1, for each family and for `fp_1f_clean_indices`",
    command="kohya-bucket plan my.toml --arch wan",
    origin="its `ImageDataset` and `ImageJsonlDatasource`",
)
def test_more_or_fewer_control_images_than_the_family_takes(command_line: Command) -> None:  # noqa: F811
    Path("control/a.png").rename("control/a_0.png")
    picture("control/a_1.png")
    file = of_folder("control_directory = 'control'\n")
    for arch in ("f2d", "qie", "ho1"):
        assert found(command_line, file, arch) == []
    for arch in ("fk", "wan", "zi"):
        assert [one["code"] for one in found(command_line, file, arch)] == ["more-control-images"]
    two = of_folder("control_directory = 'control'\nfp_1f_clean_indices = [0, 10]\n")
    (few,) = found(command_line, two, "wan")
    assert few["message"].startswith("1 item with fewer control images than the 2 that Wan takes")
    assert few["code"] == "missing-control-image"
    picture("control/a_x.png")
    assert "control-name" in {one["code"] for one in found(command_line, file, "qie")}


@reported(
    "`'list' object has no attribute 'read'` at a `control_path` with two paths",
    trainer="stops when it opens the image",
    here="exit code 1, and the keys to write: `control_path_0`, `control_path_1`",
    command="kohya-bucket plan my.toml --arch qie",
    origin="its `ImageJsonlDatasource` on 240 made-up lists",
)
def test_two_paths_in_one_control_path(command_line: Command) -> None:  # noqa: F811
    row = {"image_path": "img/a.png", "caption": "x"}
    both = ["control/a.png", "control/b.png"]
    (one,) = found(command_line, of_list(json.dumps({**row, "control_path": both})), "qie")
    assert one["code"] == "control-path"
    assert (
        found(command_line, of_list(json.dumps({**row, "control_path_0": both[0], "control_path_1": both[1]})), "qie")
        == []
    )
    bare = {**row, "image_path": "img/b.png"}
    lines = json.dumps({**row, "control_path": both[0]}) + "\n" + json.dumps(bare) + "\n"
    assert found(command_line, of_list(lines), "qie") == []
    assert [one["code"] for one in found(command_line, of_list(lines), "fk")] == ["missing-control-image"]
    (gone,) = found(command_line, of_list(json.dumps({**row, "control_path": "gone.png"})), "qie")
    assert gone["message"] == "1 control image cannot be found, at which musubi-tuner stops (gone.png)"


@reported(
    "one image and caption in several lines of a list, with other control images in each",
    trainer="names the caches by the image, so that each takes the place of the one before",
    here="each line is an item with caches of its own; `plan` shows items with other numbers of control images in "
    "batches of their own",
    command="kohya-bucket plan my.toml --arch qie",
    origin="its `ImageDataset` v0.3.4: batches of 24 made-up lists, and caches of its own program",
)
def test_lines_that_differ_in_their_controls_alone(command_line: Command) -> None:  # noqa: F811
    row = {"image_path": "img/a.png", "caption": "x"}
    controls = [["control/a.png"], ["control/b.png"], ["control/a.png", "control/b.png"], ["control/a.png"]]
    lines = [json.dumps({**row, **{f"control_path_{i}": one for i, one in enumerate(own)}}) for own in controls]
    file = of_list("\n".join(lines))
    assert [one["code"] for one in found(command_line, file, "qie")] == ["same-line", "shared-names"]
    (data,) = json.loads(command_line("plan", file, "--arch", "qie", "--json")[1])["datasets"]
    buckets = [(one["items"], one["batches"], len(one["controls"])) for one in data["buckets"]]
    assert (data["items"], buckets) == (3, [(2, 2, 1), (1, 1, 2)])
    assert "512x512 + 512x512 + 512x512" in command_line("plan", file, "--arch", "qie")[1]


@reported(
    "one `cache_directory` for two datasets, written in two ways",
    trainer="stops where both are written alike; else the datasets delete each other's caches",
    here="exit code 1 with both spellings, links included, and the caching programs stop before anything is cached; so "
    "with brackets in its path, where the trainer finds no cache",
    command="kohya-bucket plan my.toml --arch qi",
    origin="`glob` of Python, and `os.path.realpath` on 100 made-up configs",
)
def test_one_cache_folder_written_in_two_ways(command_line: Command) -> None:  # noqa: F811
    keys = "image_directory = 'img'\ncaption_extension = '.txt'\nresolution = 512\nenable_bucket = true\n"

    def config(*folders: str) -> str:
        text = "".join(f"[[datasets]]\n{keys}cache_directory = '{folder}'\n" for folder in folders)
        Path("m.toml").write_text(text, encoding="utf-8")
        return "m.toml"

    assert {one["code"] for one in found(command_line, config("c", "./c/"), "qi")} == {"shared-cache"}
    assert "'./c/' and 'c' are one folder" in command_line("plan", config("c", "./c/"), "--arch", "qi")[1]
    assert found(command_line, config("c", "d"), "qi") == []
    for pattern in ("c [1]", "c*", "c?"):
        assert [one["code"] for one in found(command_line, config(pattern), "qi")] == ["cache-brackets"]


@reported(
    "images without captions are not trained, and nothing says so",
    trainer="since 0.3.0 musubi-tuner leaves them out in silence",
    here="a warning with the names from `plan`, `doctor`, and from the programs that cache and train; an error where "
    "none has one",
    command="kohya-bucket plan my.toml --arch qi",
    origin="its `glob_images`",
)
def test_captions_that_are_missing(command_line: Command) -> None:  # noqa: F811
    Path("img/b.txt").unlink()
    (one,) = found(command_line, of_folder(), "qi")
    assert (one["code"], one["names"]) == ("missing-captions", [str(Path("img/b.png"))])
    Path("img/a.txt").unlink()
    assert found(command_line, of_folder(), "qi")[0]["names"] == [str(Path(f"img/{name}.png")) for name in "ab"]


@reported(
    "`json.decoder.JSONDecodeError: Expecting value: line 2 column 1`, `failed to load json`",
    trainer="reads one object from each line, and stops at a list, an object over several lines, and a byte order mark",
    here="one finding for the whole file, and the plan of its entries",
    command="kohya-bucket plan my.toml --arch qi",
    origin="its `ImageJsonlDatasource`",
)
def test_a_list_that_is_no_json_lines(command_line: Command) -> None:  # noqa: F811
    rows = [{"image_path": f"img/{name}.png", "caption": "x"} for name in "ab"]
    for content in (
        json.dumps(rows, indent=2),
        json.dumps(rows),
        json.dumps([{**rows[0], "caption": str(i)} for i in range(500)], indent=2),
    ):
        (one,) = [
            f for f in found(command_line, of_list(content), "qi") if f["code"] not in ("shared-names", "not-trained")
        ]
        assert one["code"] == "not-lines"
        assert "holds one JSON text, a list of " in one["message"]
    data = json.loads(command_line("plan", of_list(json.dumps(rows)), "--arch", "qi", "--json")[1])
    assert data["datasets"][0]["items"] == 2
    assert found(command_line, of_list(json.dumps(rows[0], indent=2)), "qi")[0]["code"] == "not-lines"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert [one["code"] for one in found(command_line, of_list("\ufeff" + lines), "qi")] == ["byte-order-mark"]
    assert found(command_line, of_list(lines), "qi") == []
    Path("meta.jsonl").write_text(json.dumps(rows, indent=2), encoding="utf-8")  # for sd-scripts
    text = "[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = 'img'\nmetadata_file = 'meta.jsonl'\n"
    Path("d.toml").write_text(text, encoding="utf-8")
    assert "'meta.jsonl': it holds a JSON list, but each line must be" in command_line("plan", "d.toml")[1]
    bad = found(command_line, of_list("{}\n" * 500 + lines), "qi")
    assert [one["count"] for one in bad] == [1, 1, 1, 497]
