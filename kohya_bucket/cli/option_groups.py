"""Options that belong together are the fields of a dataclass: commands take it whole, command lines field by field."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

__all__ = ["with_option_groups"]

_Command = Callable[..., None]


def with_option_groups(
    command: _Command, without: Collection[str] = (), also: Mapping[str, str] | None = None
) -> _Command:
    """Let typer see, in place of each parameter of a command that is a dataclass, the dataclass' fields as options.

    A help text may have a gap `{}` for what a function says, which stands behind the option in its annotation.

    Args:
        without: fields that mean nothing to the command; they keep their defaults.
        also: a second spelling of an option, by its field's name.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for p in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(p.annotation) and isinstance(p.annotation, type):
            options = _options_of(p.annotation, without, also or {})
            groups[p.name] = p.annotation, [option.name for option in options]
            parameters += options
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(p.replace(kind=kind, annotation=_with_help(p.annotation)))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: kind(**{field: given.pop(field) for field in own}) for name, (kind, own) in groups.items()}
        command(**made, **given)

    # what typer reads
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _with_help(hint: Any) -> Any:
    """The annotation of an option with the gap in its help text filled; any other as it is."""
    kind, option, *texts = get_args(hint) or (hint, None)
    if not texts:
        return hint
    whole = copy.copy(option)
    whole.help = option.help.format(*(text() for text in texts))
    return Annotated[kind, whole]


def _options_of(group: type, without: Collection[str], also: Mapping[str, str]) -> list[inspect.Parameter]:
    hints = {name: _with_help(hint) for name, hint in get_type_hints(group, include_extras=True).items()}
    for name in also:
        kind, option = get_args(hints[name])
        hints[name] = Annotated[kind, typer.Option(f"--{name.replace('_', '-')}", also[name], help=option.help)]
    kept = [field for field in fields(group) if field.name not in without]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in kept]
