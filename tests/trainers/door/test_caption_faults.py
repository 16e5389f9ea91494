"""Captions that are missing, nearly so, or cannot be reached now."""

import errno
import json
import random
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.trainers.door.captions import check_blank, check_broken, check_missing, read_captions
from kohya_bucket.trainers.door.findings import Findings, Severity
from tests.command_line import command_line
from tests.faults import PASSING, Faults

__all__ = ["command_line"]


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_a_folder_that_does_not_answer_has_captions_that_cannot_be_read(tmp_path, monkeypatch, code):
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    (tmp_path / "a.txt").write_text("a cat", encoding="utf-8")
    faults = Faults(tmp_path)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code):
        texts, broken = read_captions(files)
    assert texts == [None, None]
    assert list(broken) == files
    findings = Findings()
    check_broken(broken, "a trainer", "", findings)
    assert [finding.remedy for finding in findings] == ["write a caption that can be read, or move the file away"]
    assert read_captions(files) == (["a cat", None], {})


@pytest.mark.posix("links that lead in a circle, names of 300 bytes")
def test_names_that_no_file_can_have_are_of_none(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    names = ["a\0b", "n" * 300, "file/a.txt", "circle", "gone/a.txt"]
    assert read_captions([str(tmp_path / name) for name in names]) == ([None] * 5, {})


@pytest.mark.parametrize(("bare", "severity"), [(1, Severity.NOTE), (99, Severity.NOTE), (100, Severity.WARNING)])
def test_a_share_decides_how_bad_it_is_and_every_image_is_named(tmp_path, bare, severity):
    paths, findings = [str(tmp_path / f"{number}.png") for number in range(bare)], Findings()
    for path in paths[1:]:  # of one that cannot be read now nothing is known
        Path(path).write_bytes(PNG)
    check_missing(paths, 10_000, ".txt", "an empty caption is trained", "here", findings)
    check_blank([(path, " ") for path in paths], 10_000, "there", findings)
    assert {(one.code, one.severity, one.names) for one in findings} == {("missing-captions", severity, tuple(paths))}
    assert f"{bare:,} of 10,000 images {'has' if bare == 1 else 'have'} no '.txt' file" in next(iter(findings)).message


PNG = b"\x89PNG\r\n\x1a\n"
NEAR = {
    "{}.txt.txt": ".txt.txt", "{}.png.txt": ".png.txt", "{}.TXT": ".TXT", "{}.caption": ".caption",
    "{}.Tags": ".Tags", "{} .txt": " .txt", "{}.txt ": None, "{}.npz": None, "x{}.txt": None, "{}_1.txt": None,
    "{}.json": None, "{}.b.txt": ".b.txt",
}  # fmt: skip


@pytest.mark.posix("names that differ by case alone, or end in a blank")
@pytest.mark.parametrize("seed", range(20))
def test_texts_beside_an_image_that_begin_with_its_name_are_named(tmp_path, seed):
    draws, made, bare = random.Random(seed), {}, []
    kinds = ("captioned", "bare", *draws.sample(("case", *NEAR), 4))
    for number in range(30):
        stem = draws.choice(("Photo", "b.c", "d_")) + f"{number:02d}"
        (tmp_path / f"{stem}.png").write_bytes(PNG)
        kind = draws.choice(kinds)
        if kind == "captioned":
            (tmp_path / f"{stem}.txt").touch()
            (tmp_path / f"{stem}.txt.txt").touch()  # of an image with a caption of its own
            continue
        bare.append(str(tmp_path / f"{stem}.png"))
        if kind != "bare":
            (tmp_path / (f"{stem.swapcase()}.txt" if kind == "case" else kind.format(stem))).touch()
        made[bare[-1]] = "case" if kind == "case" else NEAR.get(kind)
    findings = Findings()
    check_missing(bare, 30, ".txt", "an empty caption is trained", "", findings)
    assert {path for one in findings for path in one.names if one.code == "missing-captions"} == {
        path for path, kind in made.items() if kind is None
    }
    near = [one for one in findings if one.code == "caption-extension"]
    for one in near:
        (kind,) = {made[path] for path in one.names}
        assert "written otherwise" in one.message if kind == "case" else f"caption in {kind!r} files" in one.message
        assert one.severity is Severity.WARNING
    assert len(near) == len({*made.values()} - {None})


def test_a_text_of_another_image_is_nobody_elses(tmp_path):
    for name in ("a.png", "a.b.png", "a.b.txt"):
        (tmp_path / name).write_bytes(PNG)
    findings = Findings()
    check_missing([str(tmp_path / "a.png")], 2, ".txt", "an empty caption is trained", "", findings)
    assert [one.code for one in findings] == ["missing-captions"]


def test_where_a_trainer_stops_without_a_caption_one_of_nearly_its_name_is_an_error_too(tmp_path):
    for name in ("a.mp4", "a.caption", "b.mp4"):
        (tmp_path / name).touch()
    findings, paths = Findings(), [str(tmp_path / name) for name in ("a.mp4", "b.mp4")]
    check_missing(paths, 9, ".txt", "the trainer stops", "", findings, severity=Severity.ERROR, what="clip")
    assert [(one.code, one.severity) for one in findings] == [
        ("caption-extension", Severity.ERROR), ("missing-captions", Severity.ERROR),
    ]  # fmt: skip


@pytest.fixture
def configs(tmp_path, monkeypatch):
    """Of each trainer one, and one for each kind of list, over 100 images of which `captioned` have a caption."""
    monkeypatch.chdir(tmp_path)
    for folder in ("img", "source"):
        Path(folder).mkdir()
        for number in range(100):
            Image.new("RGB", (64, 64)).save(f"{folder}/{number:02d}.png")
    keys = "resolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\nmax_bucket_reso = 128\n"
    subset = "[[datasets.subsets]]\nimage_dir = 'img'\n"
    Path("sd.toml").write_text(f"[[datasets]]\n{keys}{subset}caption_extension = '.txt'\n", encoding="utf-8")
    Path("meta.toml").write_text(f"[[datasets]]\n{keys}{subset}metadata_file = 'meta.json'\n", encoding="utf-8")
    keys = "resolution = 64\nenable_bucket = true\ncaption_extension = '.txt'\n"
    Path("musubi.toml").write_text(f"[[datasets]]\n{keys}image_directory = 'img'\n", encoding="utf-8")
    Path("list.toml").write_text(
        f"[[datasets]]\n{keys}image_jsonl_file = 'list.jsonl'\ncache_directory = 'c'\n", encoding="utf-8"
    )
    process = {"datasets": [{"folder_path": "img", "resolution": 64}], "train": {"batch_size": 1}}
    data = {"job": "extension", "config": {"name": "x", "process": [process]}}
    Path("job.json").write_text(json.dumps(data), encoding="utf-8")
    process["datasets"][0]["folder_path"] = "entries.json"
    Path("jobs_of_entries.json").write_text(json.dumps(data), encoding="utf-8")
    Path("anima.toml").write_text("source_image_dir = 'source'\nresized_image_dir = 'img'\n", encoding="utf-8")

    def make(captioned):
        texts = {f"img/{number:02d}.png": "a cat" if number < captioned else "" for number in range(100)}
        for name, text in texts.items():
            if text:
                Path(name).with_suffix(".txt").write_text(text, encoding="utf-8")
        entries = {Path(name).name: {"caption": text} for name, text in texts.items()}
        Path("meta.json").write_text(json.dumps(entries), encoding="utf-8")
        entries = {name: {"caption": text} for name, text in texts.items()}
        Path("entries.json").write_text(json.dumps(entries), encoding="utf-8")
        lines = (json.dumps({"image_path": name, "caption": text}) + "\n" for name, text in texts.items())
        Path("list.jsonl").write_text("".join(lines), encoding="utf-8")
        return sorted(path.name for path in Path().iterdir() if path.is_file() and path.name not in _LISTS)

    return make


_LISTS = ("meta.json", "entries.json", "list.jsonl")


@pytest.mark.parametrize("captioned", [1, 99, 100])
def test_every_reader_of_every_trainer_names_the_share(configs, command_line, captioned):
    pytest.importorskip("yaml")
    read = 0
    for config in configs(captioned):
        arch = ("--arch", "qi") if config in ("musubi.toml", "list.toml") else ()
        answers = [command_line("doctor", config, "--quick", *arch)[1]]
        if config != "anima.toml":
            code, text, _ = command_line("plan", config, "--strict", *arch)
            answers.append(text)
            assert code == (captioned < 100), text
        for answer in answers:
            has, missing = "has" if captioned == 99 else "have", 100 - captioned
            assert (f"{missing} of 100 images {has} no " in answer) == (captioned < 100), answer
        read += len(answers)
    assert read == 13


@pytest.mark.posix("names that differ by case alone")
def test_pictures_by_content_alone_twins_and_junk_are_said_by_every_trainer(configs, command_line):
    pytest.importorskip("yaml")
    files = [one for one in configs(100) if one in ("sd.toml", "musubi.toml", "job.json")]
    picture = Path("img/00.png").read_bytes()
    hidden = ("none", "b.jpg_large", "c.png.bak", "d.PNG~")
    for name in hidden:
        Path("img", name).write_bytes(picture)
    for name in ("readme", "notes.png.md", "e.jpg_orig"):  # by their names they could be
        Path("img", name).write_text("no picture", encoding="utf-8")
    Path("img/~$x.png").write_bytes(b"junk of an editor")
    Path("img/p.png").write_bytes(picture)
    Path("img/P.png").write_bytes(picture)
    for name in "pP":
        Path(f"img/{name}.txt").write_text("a cat", encoding="utf-8")
    assert len(files) == 3
    for config in files:
        arch = ("--arch", "qi") if config == "musubi.toml" else ()
        found = {one["code"]: one for one in json.loads(command_line("plan", config, "--json", *arch)[1])["findings"]}
        assert {Path(name).name for name in found["hidden-images"]["names"]} == set(hidden)
        assert found["hidden-images"]["severity"] == "warning"
        assert {Path(name).name for name in found["same-but-case"]["names"]} == {"p.png", "P.png"}
        assert "missing-captions" not in found
