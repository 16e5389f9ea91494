"""A function applied to a list of files, in this process or in a helper process.

A helper is a plain child process, because `concurrent.futures.ProcessPoolExecutor` imports the caller's main module
again in each process: a script without `if __name__ == "__main__"` could not scan, and in a trainer each process would
import torch first. A helper must start quickly: numpy, Pillow and whatever not every scan needs are not imported here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kohya_bucket.images.formats import UnreadableImageError, explain_os_error

Look = Callable[[str], tuple[Any, ...]]
"""Applied to one path; may raise `UnreadableImageError`, `OSError` or `ValueError`. A helper imports it by name."""

Answer = tuple[Any, ...] | str
"""A row of values, or the reason why there is none."""

_GRACE_S = 5.0


def ask(look: Look, paths: list[str]) -> list[Answer]:
    """The answer for each path."""
    answers: list[Answer] = []
    for path in paths:
        try:
            answers.append(look(path))
        except (UnreadableImageError, OSError, ValueError) as error:
            answers.append(explain_os_error(error))
    return answers


class Helper:
    """A helper process. Used by one thread at a time.

    Raises:
        OSError, EOFError: the process could not be started, or has died.
    """

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("no Python executable to start a helper process with")
        start = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
            "from kohya_bucket.images.scan_worker import serve; serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def ask(self, look: Look, paths: list[str]) -> list[Answer]:
        """`ask` in the helper process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((look, paths), self._process.stdin)
        self._process.stdin.flush()
        answers: list[Answer] = pickle.load(self._process.stdout)
        return answers

    def close(self) -> None:
        """End the process. Its pipes stay open for a thread that may still be reading."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is waiting for an unresponsive disk
            self._process.wait(_GRACE_S)


def serve() -> None:
    """Answer until the other end closes. The parent handles Ctrl-C."""
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    # What a plugin prints must not mix with the answers.
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError):
        while True:
            look, paths = pickle.load(incoming)
            pickle.dump(ask(look, paths), outgoing)
            outgoing.flush()
