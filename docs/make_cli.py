"""Writes docs/cli.md from the help texts of the commands: python docs/make_cli.py"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from kohya_bucket.cli.commands import COMMANDS  # noqa: E402
from kohya_bucket.cli.group import load_command  # noqa: E402

_HEAD = """# Command line reference

Every command with all its options. `kohya-bucket COMMAND --help` prints the usual ones, `--help-all` all of them. This
page is made by `python docs/make_cli.py`; edit the help texts, not the page.

Options may be written with `-` or `_`: `--max-bucket-reso` and `--max_bucket_reso` are the same. Exit codes: 0, all
went well; 1, something was found that needs attention, or a store cannot be read at the moment; 2, a mistake in what
was given, or files that could not be read, written or encoded; 130, interrupted.
"""


def page() -> str:
    parts = [_HEAD]
    for name in COMMANDS:
        command = load_command(name)
        parts += _section(f"kohya-bucket {name}", command, "##")
        for part in getattr(command, "commands", {}).values():
            parts += _section(f"kohya-bucket {name} {part.name}", part, "###")
    return "\n".join(parts)


def _section(title: str, command: Any, level: str) -> Iterator[str]:
    yield f"{level} {title}\n"
    for paragraph in (command.help or "").split("\n\n"):
        if text := _plain(paragraph):
            yield f"{text}\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    if arguments or options:
        yield "| | default | |\n| --- | --- | --- |"
        yield from (_row(f"`{p.metavar or p.name.upper()}`", p) for p in arguments)
        yield from (_row(_names(p), p) for p in options)
        yield ""


def _names(option: Any) -> str:
    names = sorted(option.opts, key=len, reverse=True) + list(option.secondary_opts)
    return ", ".join(f"`{name}`" for name in names)


def _row(names: str, parameter: Any) -> str:
    default = getattr(parameter.default, "value", parameter.default)
    is_value = isinstance(default, (str, int, float)) and not isinstance(default, bool)
    shown = "required" if parameter.required else f"`{default}`" if is_value and default else ""
    panel = parameter.rich_help_panel or ""
    text = " ".join(filter(None, (parameter.help, panel if panel.startswith("If ") else "")))
    return f"| {names} | {shown} | {_plain(text)} |"


def _plain(text: str) -> str:
    """One line, with what Markdown would take for its own escaped."""
    line = " ".join(text.replace("\b", "").split())
    return line.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")


if __name__ == "__main__":
    (HERE / "cli.md").write_text(page(), encoding="utf-8", newline="\n")
