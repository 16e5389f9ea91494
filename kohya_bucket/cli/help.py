"""Help pages of plain text in 80 columns: options in groups, and with `--help-all` those that few need."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import counted

ADVANCED = "Advanced"
_ALL = "kohya_bucket.help_all"
_FIRST_COLUMN = 34


def rare(*names: str, **about: Any) -> Any:
    """A `typer.Option` that only `--help-all` shows."""
    return typer.Option(*names, rich_help_panel=ADVANCED, **about)


def opt(default: Any, help: str | Callable[[], str] = "", *spelled: str, usual: bool = True, **about: Any) -> Any:
    """The default of a command's parameter or of a dataclass' field that is an option, see `with_option_groups`.

    `help` is its text, or what gives it; without `usual` only `--help-all` shows it.
    """
    return field(default=default, metadata={"help": help, "spelled": spelled, "usual": usual, "about": about})


class PlainCommand(TyperCommand):
    """A command whose help is plain text."""

    def __init__(self, *args: Any, **attrs: Any) -> None:
        super().__init__(*args, **attrs | {"rich_markup_mode": None})
        for parameter in self.params:
            _convert_quickly(parameter)

    def get_help_option(self, ctx: Any) -> Any:
        return _quick_flag(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.meta.setdefault(_ALL, not {"--help-all", "--help_all"}.isdisjoint(args)):
            args = ["--help"]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(_word(p) if p.required else f"[{_word(p)}]" for p in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        rare: list[tuple[str, str]] = []
        *parameters, help_option = self.get_params(ctx)
        for p in parameters:
            is_argument = p.param_type_name == "argument"
            title = getattr(p, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            rows = rare if title == ADVANCED else groups.setdefault(title, [])
            rows.append((_word(p) if is_argument else _names(p), _text(p)))
        more = ""
        if ctx.meta.get(_ALL):
            groups[ADVANCED] = rare
        elif rare:
            more = f"; --help-all has {counted(len(rare), 'more option')}"
        groups["Options"].append((_names(help_option), f"This page{more}."))
        for title, rows in groups.items():
            write_section(formatter, title, rows)


class PlainGroup(TyperGroup):
    """Commands whose help is plain text."""

    def get_help_option(self, ctx: Any) -> Any:
        return _quick_flag(super().get_help_option(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_section(formatter, "Options", [(_names(p), _text(p)) for p in self.get_params(ctx)])
        self.format_commands(ctx, formatter)


def write_section(formatter: Any, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Names and texts in two columns; a name that is too long for its column has a line of its own."""
    if not rows:
        return
    column = 2 + min(_FIRST_COLUMN, max(len(name) for name, _ in rows))
    with formatter.section(title):
        for name, text in rows:
            lines = textwrap.wrap(text, formatter.width - column - 2, break_on_hyphens=False) or [""]
            if len(name) > column - 2 and text:
                lines.insert(0, "")
            for i, line in enumerate(lines):
                formatter.write(f"  {'' if i else name:<{column}}{line}".rstrip() + "\n")


def _word(argument: Any) -> str:
    return f"{argument.metavar or argument.name.upper()}{' …' if argument.nargs == -1 else ''}"


def _names(option: Any) -> str:
    """`-b, --batch-size …` or `--x/--no-x`; the sign stands for a value."""
    names = ", ".join(sorted(option.opts, key=len))
    return names + "".join(f"/{name}" for name in option.secondary_opts) + ("" if option.is_flag else " …")


def _text(parameter: Any) -> str:
    default = getattr(parameter, "default", None)
    shown = isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != ""
    return (parameter.help or "") + (f" [default: {default}]" if shown else "")


def _quick_flag(option: Any) -> Any:
    if option is not None:
        option.default = False  # typer 0.29 imports pydantic (70 ms) to make that of None
    return option


def _convert_quickly(parameter: Any) -> None:
    """Go past what typer does with a value that needs no check, and say which value of a number is wrong.

    Typer 0.29 imports pydantic (70 ms) for every value; its message for a wrong number does not have the value.
    """
    kind, low = _kind(parameter)
    if kind is None or parameter.callback:
        return
    process, several = parameter.process_value, parameter.multiple or parameter.nargs == -1

    def convert(ctx: Any, value: Any) -> Any:
        if value is None and not parameter.required:
            return () if several else None
        if several and kind == list[str] and value:
            return [*value]
        if kind is Path and isinstance(value, str):
            return Path(value)
        if type(value) is kind:
            return value
        try:
            return process(ctx, value)
        except typer.BadParameter:
            _check_number(parameter.opts[0], value, kind, low)
            raise

    parameter.process_value = convert


def _kind(parameter: Any) -> tuple[Any, float | None]:
    """The type of a parameter's value and its lowest value, if it has them; before typer 0.29 those of numbers."""
    if declared := getattr(parameter, "type_descriptor", None):
        return (None if declared.parameter_info.parser else declared.annotation), declared.parameter_info.min
    kinds = {"int": int, "int range": int, "float": float, "float range": float}
    return kinds.get(parameter.type.name), getattr(parameter.type, "min", None)


def _check_number(option: str, value: Any, kind: Any, low: float | None) -> None:
    """Refuse a text that is not a number, or one below `low`, with its value, which typer's message does not have."""
    if kind in (int, float) and isinstance(value, str):
        try:
            number = kind(value)
        except ValueError:
            must = "a whole number" if kind is int else "a number"
            share = ", as a share: 0.1 for 10%" if kind is float and value.endswith("%") else ""
            raise ConfigError(f"{option} is {value!r}, but must be {must}{share}") from None
        if low is not None and number < low:
            raise ConfigError(f"{option} is {value}, but must be {low} or more")
