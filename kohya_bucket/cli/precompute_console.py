"""What `precompute` says while it encodes, and at its end."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kohya_bucket.cli.console import say
from kohya_bucket.latents.encode.worker import PrecomputeReport
from kohya_bucket.texts import counted

__all__ = ["Shown", "print_report"]


class Shown:
    """Progress with rate and remaining time, on a terminal; a line now and then elsewhere."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._bar: Progress | None = None
        self._last = self._start = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> Any:
        if self._quiet:
            return None
        if self._console.is_terminal:
            columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
                       TimeRemainingColumn())  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None, rate="")
            self._bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        rate = done / max(1e-9, now - self._start)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, rate=f"{rate:.1f}/s")
        elif now - self._last > 10 or (done == total and total):
            self._last = now
            left = f", {(total - done) / rate:.0f} s left" if done and done < total else ""
            self._console.print(f"encoded {done} of {total}, {rate:.1f}/s{left}", highlight=False)


def print_report(report: PrecomputeReport) -> None:
    """What a run did, in a few lines."""
    where = "beside the images" if report.output is None else str(report.output)
    for reason, n in report.reasons.items():
        say(f"{n} to do: {reason}")
    elsewhere = f", {report.elsewhere} are for the other processes" if report.elsewhere else ""
    say(
        f"{report.encoded} encoded, {report.current} were current, {len(report.failed)} failed{elsewhere}; "
        f"{counted(report.total, 'image')} in {counted(len(report.buckets), 'bucket')}, {where}"
    )
    if report.encoded:
        seconds = max(report.seconds, 1e-9)
        idle = 100 * report.device_idle / seconds
        say(f"{seconds:.1f} s, {report.encoded / seconds:.1f}/s, VAE idle {idle:.0f} % of the time")
    for path, reason in report.without_bucket[:10]:
        say(f"no bucket: {path}: {reason}")
    if len(report.without_bucket) > 10:
        say(f"no bucket: {len(report.without_bucket) - 10} more")
