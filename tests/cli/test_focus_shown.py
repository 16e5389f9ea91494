"""A focus on the command line: explained, counted, drawn."""

import json
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.command_line import command_line  # noqa: F401

SIZES = {"a.png": (400, 200), "b.png": (200, 400), "deep/c.png": (200, 200)}
ROWS = [
    {"image": "images/a.png", "focus": [0.0, 0.0, 0.25, 0.5]},
    {"image": "images/b.png", "focus": [0.1, 0.75, 0.3, 1.0]},
]


@pytest.fixture
def run(command_line):  # noqa: F811
    def run(*arguments):
        code, out, err = command_line(*arguments)
        return SimpleNamespace(exit_code=code, stdout=out, output=out + err)

    return run


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size).save(path)
    return tmp_path


def config(folder, table='focus = "{}/focus.jsonl"', keys="", subset=""):
    (folder / "focus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = f"""[[datasets]]
resolution = 128
enable_bucket = true
min_bucket_reso = 128
max_bucket_reso = 128
{keys}
[[datasets.subsets]]
image_dir = '{folder / "images"}'
{subset}
[kohya_bucket]
{table.format(folder.as_posix())}
"""
    (folder / "my.toml").write_text(text)
    return folder / "my.toml"


def test_simulate_says_what_is_kept(run, folder) -> None:
    (row,) = json.loads(run("simulate", "400x200", "--max-bucket-reso", 512, "--min-bucket-reso", 512, "--resolution",
                            512, "--focus", "0,0,0.25,0.5", "--json").stdout)  # fmt: skip
    assert row["cut"] == [0, 0, 512, 0]
    assert row["focus_cut"] == [1.0, 0.0]
    path = config(folder)
    (row,) = json.loads(run("simulate", folder / "images" / "a.png", "--config", path, "--json").stdout)
    assert row["cut"] == [0, 0, 128, 0]
    result = run("simulate", folder / "images" / "deep" / "c.png", "--config", path, "--json")
    assert json.loads(result.stdout)[0]["focus"] is None
    assert f"has none for {folder / 'images' / 'deep' / 'c.png'}" in result.output
    preview = folder / "preview.png"
    result = run("simulate", folder / "images" / "a.png", "--config", path, "--preview", preview)
    assert "focus" in result.output
    assert preview.is_file()
    assert run("simulate", "400x200", "--focus", "0.9,0,0.1,1").exit_code == 2


def test_plan_and_analyze_count_what_is_cut(run, folder) -> None:
    path = config(folder)
    plan = json.loads(run("plan", path, "--images", "--json").stdout)
    (dataset,) = plan["datasets"]
    assert dataset["focus"] == [{"rectangles": 2, "cut_in_middle": 2, "cut": 0}]
    assert [row["cut"] for row in dataset["image_rows"]] == [[0, 0, 128, 0], [0, 128, 0, 0]]
    page = folder / "report.html"
    result = run("analyze", "--config", path, "--html", page, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["datasets"][0]["focus"] == {"rectangles": 2, "cut_in_middle": 2, "cut": 0}
    assert '"focus":{' in page.read_text(encoding="utf-8").replace(" ", "")
    plain = json.loads(run("plan", config(folder, table=""), "--json").stdout)["datasets"][0]
    assert plain["focus"] == []


@pytest.mark.parametrize(
    ("command", "change", "word"),
    [
        ("plan", {"subset": "random_crop = true"}, "random_crop"),
        ("plan", {"keys": "enable_bucket = false"}, "enable_bucket"),
        ("plan", {"table": 'focus = "nowhere.jsonl"'}, "nowhere.jsonl"),
        ("simulate", {"subset": "random_crop = true"}, "random_crop"),
        ("simulate", {"table": "focus = 'beside'\nfocus_weight = 0.3"}, "'focus_weight'"),
        ("simulate", {"keys": "enable_bucket = false"}, "enable_bucket"),
        ("explore", {"subset": "random_crop = true"}, "random_crop"),
    ],
)
def test_what_does_not_keep_a_focus_refuses_it_in_one_line(run, folder, command, change, word) -> None:
    path = config(folder, **change)
    if "enable_bucket" in change.get("keys", ""):
        path.write_text(path.read_text().replace("enable_bucket = true\n", ""))
    arguments = {
        "plan": [path],
        "explore": [path, "--no-open", "--out", folder / "page.html"],
        "simulate": [folder / "images" / "a.png", "--config", path],
    }
    result = run(command, *arguments[command])
    assert result.exit_code == 2
    assert word in result.output
    assert not (folder / "page.html").exists()


def test_before_0_11_a_focus_of_control_images_is_refused(run, folder) -> None:
    path = config(folder, subset=f"conditioning_data_dir = '{folder / 'images'}'")
    assert run("plan", path, "--sd-scripts", "0.11.1").exit_code == 0
    refused = run("plan", path, "--sd-scripts", "0.10.6")
    assert refused.exit_code == 2
    assert "control images" in refused.output


def test_in_a_config_of_musubi_tuner(run, folder) -> None:
    (folder / "images" / "a.focus.json").write_text("[0, 0, 0.25, 1]")
    text = f"[[datasets]]\nresolution = [256, 256]\nimage_directory = '{folder / 'images'}'\ncaption_extension = '.txt'"
    path = folder / "musubi.toml"
    for table, more in (("[kohya_bucket]\nfocus = 'beside'\n", []), ("", ["--focus", "0,0,1,1"])):
        path.write_text(f"[general]\nenable_bucket = true\n{table}{text}\n")
        result = run("simulate", folder / "images" / "a.png", "--config", path, *more, "--json")
        assert result.exit_code == 0, result.output
        (row,) = json.loads(result.stdout)
        assert row["focus"] == ([0, 0, 1, 1] if more else [0, 0, 0.25, 1])
        assert row["cut"][0] == (row["cut"][2] if more else 0)
    path.write_text(f"[general]\nenable_bucket = false\n[kohya_bucket]\nfocus = 'beside'\n{text}\n")
    for name in ("a", "b", "deep/c"):
        (folder / "images" / name).with_suffix(".txt").write_text("a dog")
    (planned,) = json.loads(run("plan", path, "--json").stdout)["datasets"]
    assert planned["focus"] == [{"rectangles": 1, "cut_in_middle": 1, "cut": 0}]
    assert "focus: 1 rectangle; the middle would cut 1" in run("plan", path).output


@pytest.mark.parametrize("command", ["explore", "precompute"])
def test_commands_for_sd_scripts_alone_say_so_of_a_config_of_musubi_tuner(run, folder, command) -> None:
    path = folder / "musubi.toml"
    path.write_text(
        f"[[datasets]]\nresolution = [256, 256]\nimage_directory = '{folder}'\ncaption_extension = '.txt'\n"
    )
    more = {
        "explore": (path, "--no-open", "--out", folder / "e.html"),
        "precompute": ("--vae", "x", "-o", folder / "store", "--config", path),
    }
    result = run(command, *more[command])
    assert result.exit_code == 2
    assert "musubi-tuner" in result.output
