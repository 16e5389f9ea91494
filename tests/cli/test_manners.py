"""Short spellings, and files given in the place of others."""

import os
import shutil
from types import SimpleNamespace

import pytest
import typer.core

from kohya_bucket._version import __version__
from tests.pictures import make_pictures


@pytest.fixture
def config(folder):
    file = folder.parent / "dataset.toml"
    text = f"[[datasets]]\nresolution = 256\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = '{folder}'\n"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def buckets(tmp_path):
    file = tmp_path / "set.toml"
    sides = "[[buckets]]\nwidth = 256\nheight = {}\n"
    file.write_text(sides.format(256) + sides.format(192), encoding="utf-8")
    return file


@pytest.mark.parametrize("command", [(), ("plan",), ("cache",), ("cache", "verify")])
def test_h_is_help(command_line, command):
    short, long = command_line(*command, "-h"), command_line(*command, "--help")
    assert short == long
    assert short[0] == 0
    assert "Usage" in short[1]


def test_version(command_line):
    assert command_line("--version")[:2] == (0, f"{__version__}\n")


def test_c_is_config(command_line, config):
    usual = command_line("plan", config)
    assert command_line("plan", "-c", config) == usual
    assert command_line("plan", "--config", config) == usual
    code, _, error = command_line("plan", config, "-c", config)
    assert (code, error) == (2, f"kohya-bucket: {config} and --config {config}: give one config\n")
    assert command_line("doctor", "--quick", "-c", config)[:2] == command_line("doctor", "--quick", config)[:2]


def test_a_config_in_any_place(command_line, config, folder, buckets):
    usual = command_line("analyze", "--config", config)
    assert usual[0] == 0
    assert command_line("analyze", config) == usual
    assert command_line("analyze", "-c", config) == usual
    assert command_line("simulate", "300x200", "-c", config) == command_line("simulate", "300x200", "--config", config)
    usual = command_line("analyze", folder, "--bucket-config", buckets)
    assert usual[0] == 0
    assert command_line("analyze", folder, "--config", buckets) == usual
    code, _, error = command_line("analyze", config, "--resolution", "512")
    assert (code, "leave out --resolution" in error) == (2, True)


def test_a_folder_in_place_of_a_config(command_line, folder):
    code, _, error = command_line("doctor", folder)
    assert (code, f'or `kohya-bucket plan "{folder}"`' in error) == (2, True)
    named = folder.parent / "img"
    shutil.copytree(folder, named / "10_cat")
    assert "10 times each" not in command_line("plan", folder)[1]
    assert "10 times each" in command_line("plan", named)[1]


def test_the_rule_is_always_said(command_line, config):
    assert "\n  sd-scripts' buckets\n" in command_line("plan", config)[1]
    text = config.read_text(encoding="utf-8")
    config.write_text(text + "[kohya_bucket]\nrule = 'auto'\nnum_buckets = 2\n", encoding="utf-8")
    assert "\n  rule auto (kmeans) chose " in command_line("plan", config)[1]
    config.write_text(text.replace("enable_bucket = true", ""), encoding="utf-8")
    assert "\n  no buckets: " in command_line("plan", config)[1]


@pytest.mark.parametrize("given", ["pics [a]", "$HOME", "%HOME%", "~"])
def test_arguments_stay_as_they_were_given_on_windows(command_line, tmp_path, monkeypatch, given):
    monkeypatch.setattr(typer.core, "os", SimpleNamespace(**vars(os) | {"name": "nt"}))
    other = "pics a" if "[" in given else "home"
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    make_pictures(tmp_path / given, [(300, 400)])
    make_pictures(tmp_path / other, [(300, 400), (400, 400)])
    code, out, error = command_line("cache", "sizes", given, "-o", f"{given}.parquet")
    assert (code, out[:7], error) == (0, "1 file ", "")
    assert (tmp_path / f"{given}.parquet").is_file()
