"""Narrow terminals, files, and names that a terminal library might take for more than names."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from kohya_bucket.cli import app

NARROW = {"COLUMNS": "30", "FORCE_COLOR": "1", "TERM": "xterm"}
CONFIG = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = '{}'\n"


def config_of(folder: Path, name: str) -> str:
    config = folder.parent / "c.toml"
    config.write_text(CONFIG.format(name), encoding="utf-8")
    return str(config)


def run(*arguments: str, env: dict[str, str] | None = None) -> str:
    return CliRunner().invoke(app, list(arguments), env=env).output


def test_no_number_is_lost_on_a_narrow_terminal(folder: Path) -> None:
    config = config_of(folder, str(folder))
    table = run("plan", config, env=NARROW).split("Dataset 1")[1]  # after the progress
    assert "…" not in table
    assert "448x576" in table
    rules = ("--rules", "kohya-no-upscale,auto-optimal", "--quiet")
    table = run("compare", str(folder), *rules, env=NARROW)
    assert "…" not in table
    assert "kohya-no-upscale" in table
    assert "832x256" in run("chart", env=NARROW)


def test_a_name_with_colons_is_no_picture(folder: Path) -> None:
    assert "is no folder" in run("plan", config_of(folder, "data:cat:x"))
    assert "data:cat:x" in run("plan", config_of(folder, "data:cat:x"))


def test_no_path_is_broken_over_two_lines_of_a_file(folder: Path) -> None:
    long = folder / ("x" * 120 + ".png")
    long.write_bytes(b"no image")
    assert f"{long}: not an image" in run("analyze", str(folder))
