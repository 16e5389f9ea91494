"""Pipes, devices and texts without end where a command expects a file: one clear line, and no waiting."""

import os
from pathlib import Path

import pytest

from tests.command_line import Command

pytestmark = pytest.mark.posix("named pipes and devices of POSIX")
CONFIG = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = '{}'\n"


@pytest.fixture(params=["pipe", "/dev/zero"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What can be opened and is no regular file."""
    if request.param == "pipe":
        os.mkfifo(tmp_path / "pipe")
        return str(tmp_path / "pipe")
    return str(request.param)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "576x768", "--bucket-config", "FILE"),
        ("simulate", "576x768", "--rule", "file:FILE"),
        ("simulate", "576x768", "--config", "FILE"),
        ("simulate", "FILE"),
        ("plan", "FILE"),
        ("doctor", "FILE"),
        ("analyze", "FILE"),
        ("analyze", "--config", "FILE"),
        ("analyze", "DATA", "--cache", "FILE"),
        ("cache", "sizes", "FILE", "--output", "OUT"),
        ("compare", "FILE"),
        ("buckets", "make", "DATA", "--compare-to", "FILE"),
        ("buckets", "chart", "--bucket-config", "FILE"),
    ],
    ids=" ".join,
)
def test_no_command_waits_for_what_is_no_file(
    command_line: Command, folder: Path, no_file: str, arguments: tuple[str, ...]
) -> None:
    tables = [".csv", ".parquet", ".txt"] if arguments[0] == "compare" else []
    for suffix in ["", ".toml", ".json", *tables]:
        name = folder.parent / f"x{suffix}"
        name.symlink_to(no_file)
        words = {"FILE": str(name), "file:FILE": f"file:{name}", "DATA": str(folder), "OUT": str(folder.parent / "o")}
        code, _, errors = command_line(*(words.get(word, word) for word in arguments))
        assert (code, len(errors.splitlines())) == (2, 1), errors


def test_the_environments_config(
    command_line: Command, monkeypatch: pytest.MonkeyPatch, folder: Path, no_file: str
) -> None:
    (folder.parent / "c.toml").write_text(CONFIG.format(folder), encoding="utf-8")
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", no_file)
    code, out, _ = command_line("plan", folder.parent / "c.toml")
    assert code == 1
    assert "is a pipe or a device, but a regular file is read here" in out


@pytest.mark.weekly
@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000 + "]" * 5000, "[" + ".".join("a" * 5000) + "]", "[" + " " * 20000]
)
@pytest.mark.parametrize("option", ["--bucket-config", "--config"])
def test_a_text_without_sense_is_one_line(command_line: Command, tmp_path: Path, text: str, option: str) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(text, encoding="utf-8")
    code, _, errors = command_line("simulate", "576x768", option, file)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert "nested more than 64 deep" in errors or "on line by itself" in errors


def test_a_config_of_gigabytes_is_not_read(command_line: Command, tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    with file.open("wb") as out:
        out.truncate(1 << 34)
    for option in ("--bucket-config", "--config"):
        code, _, errors = command_line("simulate", "576x768", option, file)
        assert code == 2
        assert "is 17,179,869,184 bytes long, but such a file has 67,108,864 at most" in errors
