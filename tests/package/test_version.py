"""The version stands in one file, from which the package, the command and the build have it."""

import importlib
from pathlib import Path

import toml
from typer.testing import CliRunner

import kohya_bucket
from kohya_bucket.cli import app

ROOT = Path(__file__).parents[2]


def test_the_build_the_package_and_the_command_say_the_same() -> None:
    settings = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["dynamic"] == ["version"]
    module, _, name = settings["tool"]["setuptools"]["dynamic"]["version"]["attr"].rpartition(".")
    assert getattr(importlib.import_module(module), name) == kohya_bucket.__version__
    assert CliRunner().invoke(app, ["--version"]).stdout == f"{kohya_bucket.__version__}\n"
