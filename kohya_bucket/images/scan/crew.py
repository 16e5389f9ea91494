"""The threads and helper processes of one scan, which end with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kohya_bucket.images.scan.worker import WorkerProcess

__all__ = ["Crew"]

_GRACE_S = 5.0


class Crew:
    """Threads and helpers.

    Attributes:
        changed: to be held where they change what they share, and notified of it.
        stopped: nothing more is to be begun.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stopped = False
        self._problems: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._helpers: list[WorkerProcess] = []

    def start(self, works: list[Callable[[], None]]) -> None:
        """Do each on a thread of its own."""

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as problem:
                with self.changed:
                    self._problems.append(problem)
                    self.changed.notify_all()

        started = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
        self._threads += started
        for thread in started:
            thread.start()

    def helper(self) -> WorkerProcess | None:
        """A new helper process that is ready; None where all has ended meanwhile. `OSError` if it does not start."""
        helper = WorkerProcess()
        with self.changed:
            self._helpers.append(helper)
            late = self.stopped
        if late:  # those that were known have been closed
            helper.close()
            return None
        helper.wait_until_ready()
        return helper

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        """Until something has changed so that it is done, or for some time. Raises what a thread raised."""
        with self.changed:
            # With a timeout, since Windows delivers Ctrl-C only between waits.
            self.changed.wait_for(lambda: done() or bool(self._problems), seconds)
        if self._problems:
            raise self._problems[0]

    def end(self) -> None:
        """Begin nothing more, and let what runs end, for as long as the grace is."""
        with self.changed:
            self.stopped = True
            helpers = list(self._helpers)
        for helper in helpers:
            helper.close()
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            if thread.is_alive():  # Ctrl-C may have come before it was started, and then it cannot be joined
                thread.join(max(0.0, deadline - time.monotonic()))
