"""Options that were given on the command line, and do not count beside another one."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from kohya_bucket.errors import ConfigError

__all__ = ["given", "refuse_beside"]


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Those of a command's parameters that were given, as options: `bucket_reso_steps` is "--bucket-reso-steps"."""
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return [f"--{name.replace('_', '-')}" for name, source in sources if source and source.name == "COMMANDLINE"]


def refuse_beside(context: typer.Context, what: str, names: Iterable[str]) -> None:
    """Refuse options that would be passed over in silence.

    Args:
        context: the command's.
        what: why they do not count, as the beginning of a sentence, e.g. "--config c.toml brings its own rules".
        names: the parameters, as the command's function names them; those that were not given are no matter.

    Raises:
        ConfigError: one of them was given.
    """
    options = given(context, names)
    if options:
        raise ConfigError(f"{what}: leave out {' and '.join(options)}")
