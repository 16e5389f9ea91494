"""How far work over many files is, for whoever shows it; and whether it is still wanted, for whoever does it."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Progress", "go_on", "until"]

Progress = Callable[[int, int], None]
_here = threading.local()


def until(stopped: threading.Event) -> None:
    """What runs on this thread from now on ends where it next calls `go_on`, once `stopped` is set."""
    _here.stopped = stopped


def go_on() -> None:
    """Called from time to time by work that takes long: raises where nobody wants it any more, as after Ctrl-C."""
    stopped: threading.Event | None = getattr(_here, "stopped", None)
    if stopped is not None and stopped.is_set():
        raise RuntimeError("this work is not wanted any more")
