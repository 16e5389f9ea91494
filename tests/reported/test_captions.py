"""Captions that are not trained as they are meant"""

import json
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from tests.command_line import Command, command_line  # noqa: F401
from tests.reported.case import reported

CAPTIONS = {
    "lines": "one cat\n\na second paragraph\n\nand a third", "blank": "\n\none cat", "mark": "\ufeffone cat, red",
    "plain": "one cat\n\n", "wild": "a {red|blue} cat",
}  # fmt: skip


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("img").mkdir()
    for name, text in CAPTIONS.items():
        Image.new("RGB", (512, 512)).save(f"img/{name}.png")
        Path(f"img/{name}.txt").write_bytes(text.encode("utf-8"))


def config(subset: str = "") -> str:
    text = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = 'img'\n"
    Path("d.toml").write_text(f"{text}caption_extension = '.txt'\n{subset}\n", encoding="utf-8")
    return "d.toml"


def job() -> str:
    process = {"datasets": [{"folder_path": "img", "caption_ext": "txt"}], "train": {"batch_size": 1}}
    data = {"job": "extension", "config": {"name": "x", "process": [process]}}
    Path("job.json").write_text(json.dumps(data), encoding="utf-8")
    return "job.json"


def found(run: Command, file: str, *more: str) -> dict[str, set[str]]:
    """{code: the names} of the findings of `plan`, which are those of `doctor` and `analyze` too."""
    findings = json.loads(run("plan", file, "--json", *more)[1])["findings"]
    answers = [run("doctor", file, "--json", "--quick", *more)[1]]
    if not more or more[0] == "--arch":
        answers.append(run("analyze", "--config", file, "--json", *more)[1])
    for finding in findings:
        assert all(json.dumps(finding["message"])[1:-1] in answer for answer in answers)
    return {one["code"]: {Path(name).stem for name in one["names"]} for one in findings}


@reported(
    "captions of several paragraphs: only the first line is trained",
    "kohya-ss/sd-scripts#1155",
    "kohya-ss/musubi-tuner#834",
    trainer="sd-scripts trains the first line, and an empty caption where that is blank; musubi-tuner trains all of it",
    here="a warning in `plan`, `doctor` and `analyze`, with the number and two names",
    command="kohya-bucket plan my.toml",
    origin="`process_caption` of sd-scripts and `get_caption` of musubi-tuner, on 300 made-up files",
)
def test_captions_of_several_lines(command_line: Command) -> None:  # noqa: F811
    assert found(command_line, config())["caption-lines"] == {"lines", "blank"}
    text = command_line("plan", config())[1]
    assert (
        "2 captions of several lines, of which sd-scripts trains only the first (img/blank.png, img/lines.png)"
        in text.replace("\\", "/")
    )
    assert "of 1 the first line is blank, so an empty caption is trained" in text
    assert "caption-lines" not in found(command_line, config("enable_wildcard = true"))
    entries = {str(Path("img/plain.png").resolve()): {"caption": "one\ntwo"}}
    Path("meta.json").write_text(json.dumps(entries), encoding="utf-8")
    file = config().replace("d.toml", "f.toml")
    text = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\nmetadata_file = 'meta.json'\n"
    Path(file).write_text(text, encoding="utf-8")
    assert found(command_line, file)["caption-lines"] == {"plain"}


@reported(
    "a byte order mark (U+FEFF) in captions saved by Windows editors",
    trainer="all read the files as UTF-8, and the mark sticks to the first tag, so that it is another one",
    here="a warning with the number, two names, and `kohya-bucket fix DIR`, which takes it away",
    command="kohya-bucket doctor my.toml",
    origin="the trainers' own readers",
)
def test_a_byte_order_mark(command_line: Command) -> None:  # noqa: F811
    assert found(command_line, config())["caption-mark"] == {"mark"}
    assert found(command_line, job()) == {"caption-mark": {"mark"}}
    for file in (config(), job()):
        assert "`kohya-bucket fix img` takes it away" in command_line("plan", file)[1]
    text = "[[datasets]]\nresolution = 512\nenable_bucket = true\nimage_directory = 'img'\ncaption_extension = '.txt'\n"
    Path("m.toml").write_text(text, encoding="utf-8")
    assert found(command_line, "m.toml", "--arch", "qi") == {"caption-mark": {"mark"}}
    Path("img/plain.txt").write_bytes(b"caf\xe9")
    assert "broken-caption" in found(command_line, "m.toml", "--arch", "qi")
    assert command_line("doctor", "m.toml", "--arch", "qi", "--quick")[0] == 1
    assert found(command_line, job())["broken-caption"] == {"plain"}
    for file in (["m.toml", "--arch", "qi"], [job()]):
        assert "1 caption file not in UTF-8, at which" in (said := command_line("plan", *file)[1])
        assert "`kohya-bucket fix img` writes them as UTF-8" in said


@reported(
    "captions from a Mac are not found: names in another Unicode form (NFD beside NFC)",
    trainer="looks for the very bytes of the image's name, and trains without the caption, or leaves the image out",
    here="a warning of its own in `plan`, `doctor` and `analyze`, with both names as they are written",
    command="kohya-bucket plan my.toml",
    origin="`unicodedata.normalize` of Python, on names in both forms",
)
@pytest.mark.posix("names in both forms beside each other, which a Mac's disk does not have")
def test_names_in_another_unicode_form(command_line: Command) -> None:  # noqa: F811
    for number, name in enumerate(("caf\u00e9", "\uac00\u1e69")):
        for image in (True, False):
            form = "NFC" if image == bool(number) else "NFD"
            path = Path("img", unicodedata.normalize(form, name) + (".png" if image else ".txt"))
            if image:
                Image.new("RGB", (512, 512)).save(path)
            else:
                path.write_text("a cat", encoding="utf-8")
    files = [config(), "m.toml", job()]
    keys = "resolution = 512\nenable_bucket = true\nimage_directory = 'img'\ncaption_extension = '.txt'\n"
    Path("m.toml").write_text(f"[[datasets]]\n{keys}", encoding="utf-8")
    for file, more in zip(files, ((), ("--arch", "qi"), ()), strict=True):
        findings = found(command_line, file, *more)
        assert {unicodedata.normalize("NFC", one) for one in findings["unicode-form"]} == {"caf\u00e9", "\uac00\u1e69"}
        assert "missing-captions" not in findings
        text = command_line("plan", file, *more)[1]
        assert "2 images have a caption file whose name looks the same" in text
        assert r"'cafe\u0301.png' beside 'caf\xe9.txt'" in text


@reported(
    "wildcards and several captions of one image have no effect with cached text encoder outputs",
    "kohya-ss/sd-scripts#1750",
    "kohya-ss/sd-scripts#1583",
    "kohya-ss/sd-scripts#2361",
    trainer="the outputs are made of the whole text with its braces, and prefix and suffix are left out",
    here="a warning that names the captions and the settings that do nothing",
    command="kohya-bucket plan my.toml --cache-text-encoder-outputs",
    origin="`new_cache_text_encoder_outputs` of sd-scripts, with a strategy that listens",
)
def test_wildcards_and_cached_text_outputs(command_line: Command) -> None:  # noqa: F811
    option = "--cache-text-encoder-outputs"
    assert "cached-captions" not in found(command_line, config("enable_wildcard = true"))
    assert found(command_line, config("enable_wildcard = true"), option)["cached-captions"] == {"wild", "lines"}
    assert "cached-captions" not in found(command_line, config(), option)
    others = (
        "caption_prefix = 'a'\ncaption_suffix = 'b'\nsecondary_separator = ';;;'\ncaption_dropout_every_n_epochs = 2"
    )
    unused = {"caption_prefix", "caption_suffix", "caption_dropout_every_n_epochs"}
    assert found(command_line, config(others), option)["cached-captions"] == unused
