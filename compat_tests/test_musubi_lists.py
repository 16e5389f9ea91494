"""Items, captions and control images by this package against musubi-tuner's own data sources (MUSUBI_DIR)."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES
from kohya_bucket.trainers.musubi.controls import controls_wanted
from kohya_bucket.trainers.musubi.families import architecture_named
from kohya_bucket.trainers.musubi.keys import ClipKeys, ImageKeys
from kohya_bucket.trainers.musubi.listing import list_items

HERE = Path(__file__).resolve().parent
FAMILIES = ("wan", "fk", "qie", "qi")


@pytest.fixture(scope="module")
def source(musubi_source):
    pytest.importorskip("cv2")
    if not (musubi_source / "musubi_tuner" / "dataset" / "datasources.py").is_file():
        pytest.skip("versions before 0.3 have their data sources elsewhere")
    return musubi_source


def theirs(source, folder, cases):
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"cases": cases, "out": str(folder / "out.json")}), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "musubi_lists_script.py"), str(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


def mine(keys, family):
    findings = Findings()
    listed = list_items(keys, "dataset 1", findings, architecture_named(family))
    wrong = findings.of(Severity.ERROR)
    ours = [f for f in wrong if f.code != "no-items"]  # it goes on with nothing, and ends later
    return listed, ours


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path, "PNG")


@pytest.mark.parametrize("family", FAMILIES)
def test_control_images_of_folders(source, tmp_path, family):
    """A law over made-up folders: an error is named where its data source stops, and else the same files are read."""
    draws, cases, made = random.Random(family), [], []
    for number in range(60):
        folder = tmp_path / str(number)
        stems = draws.sample(["im", "im_1", "im_12", "a.b", "a", "x"], draws.randint(1, 4))
        for stem in stems:
            picture(folder / "i" / f"{stem}.png")
            (folder / "i" / f"{stem}.txt").write_text("a", encoding="utf-8")
            for ending in draws.choice([[""], [""], ["_0", "_1"], ["", "_1"], ["_2", "_0"], [], ["_x"], [".y"]]):
                picture(folder / "c" / f"{stem}{ending}.png")
        picture(folder / "c" / "unrelated.png")
        keys = ImageKeys(
            image_directory=str(folder / "i"), caption_extension=".txt", control_directory=str(folder / "c")
        )
        made.append(keys)
        cases.append({"class": "ImageDirectoryDatasource", "arguments": {
            "image_directory": keys.image_directory, "caption_extension": ".txt",
            "control_directory": keys.control_directory,
            "control_count_per_image": controls_wanted(keys, ARCHITECTURES[family]),
        }})  # fmt: skip
    stopped = 0
    for keys, expected in zip(made, theirs(source, tmp_path, cases), strict=True):
        listed, wrong = mine(keys, family)
        assert bool(wrong) == isinstance(expected, str), (keys, expected, [f.text for f in wrong])
        stopped += bool(wrong)
        if not wrong:
            assert set(itertools.chain(*listed.controls)) == {path for _, _, controls in expected for path in controls}
    assert 10 < stopped < 55


ROWS = [
    {"image_path": "i.png", "caption": "x"},
    {"image_path": "i.png", "caption": "x", "control_path": "c.png"},
    {"image_path": "i.png", "caption": "x", "control_path_0": "c.png", "control_path_1": "d.png"},
    {"image_path": "i.png", "caption": "x", "control_path_0001": "c.png", "control_path_0002": "d.png"},
    {"image_path": "i.png", "caption": "x", "control_path": ["c.png", "d.png"]},
    {"image_path": "i.png", "caption": "x", "control_path": "gone.png"},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_control_images_of_lists(source, tmp_path, monkeypatch, family):
    for name in ("i.png", "c.png", "d.png"):
        picture(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    draws, cases, made = random.Random(family), [], []
    for number in range(60):
        rows = [
            {**row, "caption": str(i)} if "caption" in row else row
            for i, row in enumerate(draws.choices(ROWS[: draws.choice([2, 4, 6])], k=draws.randint(1, 3)))
        ]
        file = tmp_path / f"{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        made.append(ImageKeys(image_jsonl_file=str(file), cache_directory="k"))
        wanted = controls_wanted(made[-1], ARCHITECTURES[family])
        arguments = {"image_jsonl_file": str(file), "control_count_per_image": wanted}
        cases.append({"class": "ImageJsonlDatasource", "arguments": arguments})
    stopped = 0
    for keys, expected in zip(made, theirs(source, tmp_path, cases), strict=True):
        listed, wrong = mine(keys, family)
        wrong = [f for f in wrong if "names no control images" not in f.message]  # which its caching program refuses
        assert bool(wrong) == isinstance(expected, str), (Path(keys.image_jsonl_file).read_text(), expected, wrong)
        stopped += bool(wrong)
        if not wrong:
            assert sorted(itertools.chain(*listed.controls)) == sorted(
                path for _, _, controls in expected for path in controls
            )
    assert 5 < stopped < 55


def test_control_clips(source, tmp_path):
    for name in ("v/a.mp4", "v/b.mp4", "v/c.mp4", "full/a.mp4", "full/b.MOV", "full/c/0.png", "less/a.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for stem in "abc":
        (tmp_path / "v" / f"{stem}.txt").write_text("x", encoding="utf-8")
    rows = [{"video_path": str(tmp_path / "v" / "a.mp4"), "caption": "x"}]
    rows.append({**rows[0], "control_path": str(tmp_path / "full" / "a.mp4")})
    lists = {"none": rows[:1], "some": rows, "all": rows[1:], "gone": [{**rows[0], "control_path": "gone.mp4"}],
             "two": [{**rows[0], "control_path": ["a", "b"]}],
             "empty": [{**rows[0], "control_path": ""}, rows[1]]}  # fmt: skip
    made, cases = [], []
    for name in ("full", "less", "gone"):
        more = {
            "video_directory": str(tmp_path / "v"),
            "caption_extension": ".txt",
            "control_directory": str(tmp_path / name),
        }
        made.append(ClipKeys(**more))
        cases.append({"class": "VideoDirectoryDatasource", "arguments": more})
    for name, entries in lists.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in entries), encoding="utf-8")
        made.append(ClipKeys(video_jsonl_file=str(file), cache_directory="k"))
        cases.append({"class": "VideoJsonlDatasource", "arguments": {"video_jsonl_file": str(file)}})
    stops = []
    for keys, expected in zip(made, theirs(source, tmp_path, cases), strict=True):
        listed, wrong = mine(keys, "wan")
        assert bool(wrong) == isinstance(expected, str), (keys, expected, wrong)
        stops.append(bool(wrong))
        if not wrong:
            assert sorted(itertools.chain(*listed.controls)) == sorted(
                path for _, _, controls in expected for path in controls
            )
    assert stops == [False, True, True, False, True, False, True, True, False]


def test_lists_that_are_none(source, tmp_path):
    """Lists with a byte order mark, blank lines, or one JSON text in place of lines; captions of several kinds."""
    picture(tmp_path / "i.png")
    row = {"image_path": str(tmp_path / "i.png"), "caption": "a\n\nb"}
    lines = json.dumps(row) + "\n"
    contents = {
        "good": lines * 2, "bom": "\ufeff" + lines, "list": json.dumps([row] * 3, indent=2),
        "flat": json.dumps([row, row]),
        "object": json.dumps(row, indent=2), "blank": lines + "\n" + lines, "no end": lines + lines.strip(),
        "marked": json.dumps({**row, "caption": "\ufeffa"}),
    }  # fmt: skip
    made, cases = [], []
    for name, content in contents.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text(content, encoding="utf-8")
        made.append(ImageKeys(image_jsonl_file=str(file), cache_directory="k"))
        cases.append({"class": "ImageJsonlDatasource", "arguments": {"image_jsonl_file": str(file)}})
    for name, keys, expected in zip(contents, made, theirs(source, tmp_path, cases), strict=True):
        _, wrong = mine(keys, "qi")
        assert bool(wrong) == isinstance(expected, str), (name, expected, wrong)
        assert len(wrong) <= 1
        if name == "good":
            assert [caption for _, caption, _ in expected] == ["a\n\nb"] * 2  # all of it


def test_caption_files(source, tmp_path):
    texts = {"plain": b"a\n\nb\n", "mark": b"\xef\xbb\xbfa", "latin": b"\xe9", "empty": b""}
    wrong = {"mark": ["caption-mark"], "latin": ["broken-caption"], "empty": ["missing-captions"]}
    made, cases = [], []
    for name, content in texts.items():
        picture(tmp_path / name / "i.png")
        (tmp_path / name / "i.txt").write_bytes(content)
        made.append(ImageKeys(image_directory=str(tmp_path / name), caption_extension=".txt"))
        arguments = {"image_directory": str(tmp_path / name), "caption_extension": ".txt"}
        cases.append({"class": "ImageDirectoryDatasource", "arguments": arguments})
    for name, keys, expected in zip(texts, made, theirs(source, tmp_path, cases), strict=True):
        findings = Findings()
        list_items(keys, "dataset 1", findings)
        codes = [f.code for f in findings]
        assert codes == wrong.get(name, [])
        assert isinstance(expected, str) == (name == "latin")
        if name != "latin":
            assert expected[0][1] == {"plain": "a\n\nb", "mark": "\ufeffa", "empty": ""}[name]
