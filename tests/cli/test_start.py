"""What a command imports before it does anything: that is how long it takes to start."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.cli.commands import COMMANDS
from kohya_bucket.cli.group import load_command

RUN = """
import contextlib, io, json, sys
from kohya_bucket.cli import main
seen, new = set(), []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["kohya-bucket", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    new.append([*sys.modules.keys() - seen])
    seen.update(sys.modules)
    assert out.getvalue() or arguments[0] == "simulat"
print(json.dumps(new))
"""
ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "PIL", "toml", "torch", "pyarrow", "rich", "pydantic"}
ROOM = "kohya_bucket.cli.commands."


def imported(*commands: tuple[str, ...]) -> list[set[str]]:
    """What each command line imports, one after the other in one process."""
    command = [sys.executable, "-c", RUN, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return [set(modules) for modules in json.loads(done.stdout)]


def test_help_imports_one_command_and_no_arrays() -> None:
    every = [("--version",), ("--help",), ("simulat",), *((command, "--help") for command in COMMANDS)]
    known: set[str] = set()
    for (command, *_), modules in zip(every, imported(*every), strict=True):
        assert not modules & HEAVY, command
        home = {ROOM + command.replace("-", "_")} if command in COMMANDS else set()
        assert {name for name in modules if name.startswith(ROOM)} == home - known - {ROOM}, command
        known |= home


@pytest.mark.long
def test_a_plan_needs_no_torch() -> None:
    assert not imported(("plan", "configs/demo.toml"))[0] & {"torch", "pyarrow", "diffusers"}


def test_what_is_said_of_a_command_is_said_once() -> None:
    listed = CliRunner().invoke(app, ["--help"]).stdout
    for name, line in COMMANDS.items():
        assert line in listed
        command = load_command(name)
        assert command.name == name
        assert str(command.help).split("\n\n")[0] == line
        assert line not in (inspect.getdoc(inspect.unwrap(command.callback)) or "")


def test_a_slip_is_answered() -> None:
    assert "Did you mean 'simulate'?" in CliRunner().invoke(app, ["simulat"]).stderr
