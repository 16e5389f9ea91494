"""Help pages in a terminal of 80 columns."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kohya_bucket.cli import app
from kohya_bucket.cli.commands import COMMANDS, SECTIONS
from kohya_bucket.cli.group import load_command

GROUPS = {name: load_command(name) for name in COMMANDS}
PAGES = [
    part
    for name, group in GROUPS.items()
    for part in [(name,), *((name, its) for its in getattr(group, "commands", ()))]
]


def page(*command: str) -> str:
    return CliRunner().invoke(app, list(command), env={"COLUMNS": "80"}).stdout


@pytest.mark.parametrize("command", PAGES, ids=" ".join)
def test_a_page_fits_and_cuts_no_option(command: tuple[str, ...]) -> None:
    short, full = page(*command, "--help"), page(*command, "--help-all")
    assert len(short.splitlines()) < 40
    assert max(map(len, (short + full).splitlines())) <= 80
    found = GROUPS[command[0]]
    parameters = (found.commands[command[1]] if command[1:] else found).params
    for parameter in parameters:
        if parameter.param_type_name == "option":
            names = [*parameter.opts, *parameter.secondary_opts]
            rows = [line.replace("/", " ").replace(",", " ").split() for line in full.splitlines()]
            assert any(set(names) <= set(row) for row in rows), names


OF_THE_RESULT = {"--output", "-o"}  # where it goes; the text says what it is: a page, a store, a picture
OF_A_FILE = {"-c"}  # --config or --bucket-config: each takes the other's file, and what it holds decides


def test_an_option_means_the_same_in_every_command() -> None:
    meanings: dict[str, set[tuple[str, ...]]] = {}
    for command in PAGES:
        found = GROUPS[command[0]]
        for option in (found.commands[command[1]] if command[1:] else found).params:
            if option.param_type_name == "option":
                declared = getattr(option, "type_descriptor", None)  # before typer 0.29 there is none
                kind = str(declared.annotation) if declared else option.type.name
                name = max(option.opts, key=len)
                for spelled in (*option.opts, *option.secondary_opts):
                    meanings.setdefault(spelled, set()).add((name, kind, option.help))
    assert {name for name, of_it in meanings.items() if len(of_it) > 1} == OF_THE_RESULT | OF_A_FILE
    assert len({name for of_it in meanings.values() for name, *_ in of_it}) <= 80


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kohya-bucket pl", "plan"), ("kohya-bucket plan --gp", "--gpus"), ("kohya-bucket cache ve", "verify")],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    asked = {"_KOHYA_BUCKET_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    words = [
        sys.executable,
        "-c",
        "import sys; sys.argv[0] = 'kohya-bucket'; from kohya_bucket.cli import main; main()",
    ]
    done = subprocess.run(words, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [offered]


def test_options_come_in_groups() -> None:
    assert [line for line in page("analyze", "--help-all").splitlines() if line[:1].isalpha()][1:] == [
        "Arguments:", "Options:", "Buckets:", "Advanced:",
    ]  # fmt: skip
    assert "--switching" not in page("analyze", "--help")
    assert "--recursive/--no-recursive" in page("analyze", "--help-all")


def test_commands_come_in_sections() -> None:
    listed = page("--help").splitlines()
    assert [line[:-1] for line in listed if line[:1].isalpha() and line.endswith(":")] == ["Options", *SECTIONS]
    for name, line in COMMANDS.items():
        assert f"  {name:<12}  {line}" in listed
