"""The terminal: texts of users in one line, numbers whole however narrow it is, and progress. rich is imported late."""

from __future__ import annotations

import codecs
import contextlib
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from kohya_bucket.texts import one_line

if TYPE_CHECKING:
    from rich.console import Console


_ENCODING_ERRORS = "kohya_bucket.plain"
_PLAIN = {"→": "->", "…": "...", "█": "#", **dict(zip("▁▂▃▄▅▆▇", "..::++#", strict=True))}

_PLAIN_HEAD = "    \n    \n -- \n" + "    \n" * 5  # `rich.box.SIMPLE_HEAD` in ASCII
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}  # of findings, the most urgent first
_FILE_WIDTH = 140
_ANY_WIDTH = 10_000
_SECONDS_BETWEEN_LINES = 10


def say_plainly(*streams: TextIO) -> None:
    """Show what a stream's encoding lacks, and file names that are not text, escaped and not as a traceback."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ENCODING_ERRORS)


def say(text: str = "", *, err: bool = False) -> None:
    """One line for a reader, whatever names are in it. JSON is printed by `typer.echo`, as it is."""
    import typer

    typer.echo(one_line(text), err=err)


def say_first(lines: Sequence[str], limit: int = 10, rest: str = "", *, indent: str = "  ", err: bool = False) -> None:
    """The first `limit` lines, and how many more there are; `rest` says where those are."""
    for line in lines[:limit]:
        say(indent + line, err=err)
    if len(lines) > limit:
        say(f"{indent}… and {len(lines) - limit:,} more{rest}", err=err)


def plain_console(*, width: int | None = None) -> Console:
    """A console whose `print` shows a text in one line, and names as they are, with `:x:` and `[x]` in them too."""
    from rich.console import Console

    class Plain(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(one_line(part) if isinstance(part, str) else part for part in objects), **options)

    return Plain(width=width, markup=False, highlight=False, emoji=False)


def wide_console() -> Console:
    """Standard output as wide as the terminal; wide enough for any table where it goes to a file or a pipe."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=max(console.width, _FILE_WIDTH))


def print_table(
    console: Console, rows: Sequence[Mapping[str, str]], *, left: int = 1, spare: Sequence[str] = (),
    total: bool = False, **look: Any,
) -> None:  # fmt: skip
    """Print all of a table: where the terminal is too narrow its lines wrap, and no digit is lost.

    Args:
        rows: cells by their headings; all but the first `left` columns are numbers.
        spare: columns that go, one after the other, where all do not fit.
        total: the last row is set apart.
        look: of `rich.table.Table`.
    """
    from rich.box import Box
    from rich.table import Table

    if look.get("box") and console.options.ascii_only:  # rich draws bars there, close to what stands between them
        look["box"] = Box(_PLAIN_HEAD, ascii=True)

    def table(without: Sequence[str]) -> Table:
        drawn = Table(pad_edge=False, **{"box": None, **look})
        kept = [name for name in rows[0] if name not in without]
        for i, name in enumerate(kept):
            drawn.add_column(name, justify="left" if i < left else "right", no_wrap=True, vertical="bottom")
        for number, row in enumerate(rows):
            drawn.add_row(*(row[name] for name in kept), end_section=total and number == len(rows) - 2)
        return drawn

    # As few spare columns go as let the table fit; where even all of them do not, it is printed wider than it fits.
    tables = [table(spare[:n]) for n in range(len(spare) + 1)]
    widths = [console.measure(one, options=console.options.update(max_width=_ANY_WIDTH)).maximum for one in tables]
    dropped = next((n for n, width in enumerate(widths) if width <= console.width), len(spare))
    wide = console if widths[dropped] <= console.width else plain_console(width=widths[dropped])
    wide.print(tables[dropped])
    if dropped:
        console.print(f"(without {', '.join(spare[:dropped])}: a terminal of {widths[0]} columns shows all)")


def _in_other_words(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks: drawn with plain characters where it is drawing, escaped where it is a name."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode("ascii") for c in text), error.end


codecs.register_error(_ENCODING_ERRORS, _in_other_words)


@contextlib.contextmanager
def scan_progress(title: str, *, quiet: bool = False, done_as: str = "") -> Iterator[Callable[[int, int], None] | None]:
    """A `progress(done, total)` function, or None where it would not be seen.

    With `done_as`, e.g. "encoded", the rate is shown too, and where there is no terminal a line now and then.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not (console.is_terminal or done_as):
        yield None
        return
    start = last = time.monotonic()

    def rate(done: int) -> float:
        return done / max(1e-9, time.monotonic() - start)

    def line(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES or (done == total and total):
            last = time.monotonic()
            left = f", {(total - done) / rate(done):.0f} s left" if done and done < total else ""
            say(f"{done_as} {done} of {total}, {rate(done):.1f}/s{left}", err=True)

    if not console.is_terminal:
        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    per_second = [TextColumn("{task.fields[rate]}")] if done_as else []
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), *per_second, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, rate="")
        yield lambda done, total: bar.update(task, completed=done, total=total, rate=f"{rate(done):.1f}/s")
