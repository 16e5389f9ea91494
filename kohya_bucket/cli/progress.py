"""One progress bar for everything that goes over many files: on the terminal only, on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["scan_progress"]


@contextlib.contextmanager
def scan_progress(title: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A `progress(done, total)` function, or None where nobody would see it."""
    if quiet:
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
