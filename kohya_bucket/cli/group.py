"""The commands as one program: each is imported when it is called, and a user's mistake is one line."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_group

from kohya_bucket._version import __version__
from kohya_bucket.checks import path_meant
from kohya_bucket.cli.commands import COMMANDS, OLD_WORDS, SECTIONS
from kohya_bucket.cli.help import PlainCommand, PlainGroup, write_section
from kohya_bucket.errors import KohyaBucketError, StorageError, UnreadableError, why_not_written
from kohya_bucket.texts import one_line

_INTERRUPTED = 130
_COMPLETE = "_KOHYA_BUCKET_COMPLETE"  # typer's name for it


class _Unread(TyperCommand):
    """A command of which the name and one line are known: enough to list it, or to suggest it for a slip."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return load_command(str(self.name)).make_context(info_name, args, parent, **extra)


class _Commands(PlainGroup):
    """The commands. Ctrl-C ends each of them with one line that says which was interrupted, and how far it was."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, line in COMMANDS.items():
            self.add_command(_Unread(name, help=line))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, section in SECTIONS.items():
            write_section(formatter, title, [(f"{name:<12}", line) for name, line in section.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, [*OLD_WORDS.get(args[0], args[:1]), *args[1:]])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, RuntimeError) as error:  # typer itself would end without a word
            # while a thread starts, Ctrl-C comes as a RuntimeError of Python's own lock
            interrupt = error if isinstance(error, KeyboardInterrupt) else error.__context__
            if isinstance(error, typer.Exit) or not isinstance(interrupt, KeyboardInterrupt):
                raise
            # the interrupt of a scan says how far it was
            print(f"kohya-bucket {ctx.invoked_subcommand}: {one_line(interrupt) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    name="kohya-bucket",
    help="Aspect ratio bucketing for sd-scripts and any PyTorch loop: plan it, explain it, train on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # sd-scripts spells its options with underscores; people paste them.
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()  # without one typer asks for a command of its own
def _before_any(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None: ...


def run() -> None:
    """Run the command that `sys.argv` names, and exit. A user's mistake is one line and exit code 2."""
    if _COMPLETE in os.environ:  # asked by a shell; docs/look.md has the line that makes it ask
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        app(windows_expand_args=False)  # a folder "pics [a]" is not a pattern for "pics a", and names may have a $
    except (UnreadableError, StorageError) as error:  # no mistake of the user's
        print(f"kohya-bucket: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except KohyaBucketError as error:
        print(f"kohya-bucket: {one_line(error)}", file=sys.stderr)
    except BrokenPipeError:  # as with `| head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        # Without a name it is most often standard output, redirected to a disk that is full.
        text = why_not_written(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        text += f": {path_meant(error.filename)}" if isinstance(error, FileNotFoundError) and error.filename else ""
        print(f"kohya-bucket: {one_line(text)}", file=sys.stderr)
    sys.exit(2)


def load_command(name: str) -> Any:
    """A command, or a group of them, as typer makes it from its module. Its help begins with the line that lists it."""
    module = importlib.import_module(f"kohya_bucket.cli.commands.{name.replace('-', '_')}")
    from kohya_bucket.cli.options import with_option_groups

    alone = typer.Typer(name=name, cls=PlainGroup, no_args_is_help=True, rich_markup_mode=None)
    kind, groups = getattr(module, "KIND", PlainCommand), getattr(module, "OPTION_GROUPS", {})
    for made in getattr(module, "SUBCOMMANDS", (module.__name__.rpartition(".")[2],)):
        command = with_option_groups(getattr(module, made), **groups.get(made, {}))
        alone.command(made.strip("_").replace("_", "-"), cls=kind)(command)
    group = get_group(alone)
    loaded: Any = group.commands.get(name, group)
    loaded.help = f"{COMMANDS[name]}\n\n{loaded.help}" if loaded.help else COMMANDS[name]
    return loaded
