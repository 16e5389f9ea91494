"""The command line. One file per command, each with a `register(app)`; none computes anything of its own."""

from __future__ import annotations

import functools
import importlib
import io
import pkgutil
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from kohya_bucket.cli.console import ENCODING_ERRORS
from kohya_bucket.errors import KohyaBucketError, why_not_written

__all__ = ["app", "main", "register_commands"]

_INTERRUPTED = 130


class _Commands(TyperGroup):
    """The commands. Ctrl-C ends each of them with one line that says which was interrupted, and how far it was."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # typer itself would end without a word
            # that of a scan says how far it was
            print(f"kohya-bucket {ctx.invoked_subcommand}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    name="kohya-bucket",
    help="Aspect ratio bucketing for sd-scripts and any PyTorch loop: plan it, explain it, train on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # sd-scripts spells its options with underscores; people paste them.
    context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
)


@functools.cache
def register_commands() -> None:
    """Import every command of this package and hand it the app, once."""
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        register = getattr(importlib.import_module(f"{__name__}.{module}"), "register", None)
        if register is not None:
            register(app)


def main() -> None:
    """Entry point: a user's mistake ends with one clear line and exit code 2, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # File names that are no text, and consoles without the character: shown escaped, not a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ENCODING_ERRORS)
    try:
        register_commands()
        app()
    except KohyaBucketError as error:
        print(f"kohya-bucket: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("kohya-bucket: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        # Without a name it is most often standard output, redirected to a disk that is full.
        text = why_not_written(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        print(f"kohya-bucket: {text}", file=sys.stderr)
        sys.exit(2)
