"""Options that were given on the command line, and do not count beside another one."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from kohya_bucket.errors import ConfigError

__all__ = ["refuse_beside"]


def refuse_beside(context: typer.Context, what: str, names: Iterable[str]) -> None:
    """Refuse options that would be passed over in silence.

    Args:
        context: the command's.
        what: why they do not count, as the beginning of a sentence, e.g. "--config c.toml brings its own rules".
        names: the parameters, as the command's function names them; those that were not given are no matter.

    Raises:
        ConfigError: one of them was given.
    """
    given = []
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            given.append(f"--{name.replace('_', '-')}")
    if given:
        raise ConfigError(f"{what}: leave out {' and '.join(given)}")
