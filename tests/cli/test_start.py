"""What a command imports before it does anything: that is how long it takes to start."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.cli.commands import COMMANDS, HOMES
from kohya_bucket.cli.group import load_command

RUN = """
import sys
from kohya_bucket.cli import main
sys.argv = ["kohya-bucket", *sys.argv[1:]]
try:
    main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""
ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "PIL", "toml", "torch", "pyarrow"}
ROOM = "kohya_bucket.cli.commands."


def imported(*arguments: str) -> set[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout
    return set(done.stderr.split())


def test_version_imports_no_other_command() -> None:
    modules = imported("version")
    assert not [name for name in modules if name.startswith(ROOM)]
    assert not modules & {*HEAVY, "rich"}


def test_a_plan_needs_no_torch() -> None:
    assert not imported("plan", "configs/demo.toml") & {"torch", "pyarrow", "diffusers"}


def test_the_list_of_commands_imports_none() -> None:
    modules = imported("--help")
    assert not any(name.startswith(ROOM) for name in modules)
    assert not modules & HEAVY


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_one_command_and_no_arrays(command: str) -> None:
    modules = imported(command, "--help")
    homes = [name for name in modules if name.startswith(ROOM)]
    assert homes == [ROOM + HOMES.get(command, "." + command.replace("-", "_"))[1:]] * (command != "version")
    assert not modules & HEAVY


def test_what_is_said_of_a_command_is_said_once() -> None:
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    for name, line in COMMANDS.items():
        assert line in listed
        command = load_command(name)
        assert command.name == name
        assert str(command.help).split("\n\n")[0] == line
        assert line not in (inspect.getdoc(inspect.unwrap(command.callback)) or "")


def test_a_slip_is_answered_without_importing_a_command() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "simulat"], capture_output=True, text=True, check=True)
    assert "Did you mean 'simulate'?" in done.stderr
    assert ROOM + "simulate" not in done.stderr
