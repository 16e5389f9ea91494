"""Run work over many files: alone, on threads or on processes, as a measurement says.

On a warm local disk one thread is bound by the interpreter, and threads only make it slower; on a slow or
distant disk nearly all time is waiting, and many threads wait side by side. So the first files are done
alone, with a look at how much of the time was spent computing. Rows go straight into arrays that were
allocated beforehand, so whatever is finished survives an interrupt.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.arrow_stat import can_stat_together
from kohya_bucket.images.scan.crew import Crew
from kohya_bucket.images.scan.ray_pool import run_on_ray
from kohya_bucket.images.scan.rows import Rows, row_dtype
from kohya_bucket.images.scan.work import WORK, Failures

__all__ = ["Engine", "Job"]

Engine = Literal["auto", "alone", "threads", "processes", "ray"]

_PROBE_ROWS = 64
_PROBE_S = 0.02
_CHUNK = 1024
_HELPER_CHUNK = 4096
# After so many rows the choice is made anew: a disk that was cold may have become warm.
_ROUND = 1 << 17
_MAX_THREADS = 48
_MAX_PROCESSES = 8
# Threads that spend nearly all their time in calls during which other threads run.
_CALLERS = 4
_COMPUTING = 0.3
_WORTH_PROCESSES_S = 0.5
_REPORT_EVERY_S = 0.1


class Job:
    """One piece of work over N paths; what was finished so far is in `rows`, `done` and `failures`.

    Attributes:
        rows: [N] structured array, see `row_dtype`.
        done: [N] bool, the rows that were looked at.
        failures: (index, reason), unordered.
        engines: what each round ran on, in order.
    """

    def __init__(
        self,
        work: str,
        paths: Sequence[str],
        *,
        workers: int | None = None,
        engine: Engine = "auto",
        progress: Progress | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise KohyaBucketError(f"workers is {workers}, but must be 1 or more; leave it out for as many as help")
        self.work = work
        self.paths = paths
        self.rows: Rows = np.zeros(len(paths), dtype=row_dtype(work))
        self.done: npt.NDArray[np.bool_] = np.zeros(len(paths), dtype=bool)
        self.failures: Failures = []
        self.engines: list[str] = []
        self._engine = "alone" if workers is not None and workers == 1 and engine == "auto" else engine
        self._workers = workers
        self._progress = progress
        self._reported = 0.0
        self._taken = 0
        self._finished = 0
        self._over = False
        self._crew = Crew()

    def run(self) -> None:
        """Do all of it. On KeyboardInterrupt what is finished stays, and the interrupt goes on to the caller."""
        with warnings.catch_warnings():
            # Set once here, for all threads: Pillow warns about every large or slightly damaged image.
            warnings.simplefilter("ignore")
            try:
                while self._taken < len(self.paths):
                    self._round()
            finally:
                try:
                    self._crew.end()
                finally:
                    with self._crew.changed:
                        self._over = True  # the caller reads the rows now; what comes later is not kept
        self._report(force=True)

    def _round(self) -> None:
        engine = self._probe() if self._engine == "auto" else self._engine
        if self._taken >= len(self.paths):
            return
        self.engines.append(engine)
        if engine == "ray":
            with self._crew.changed:
                self._taken = len(self.paths)
            self._keep(0, *run_on_ray(self.work, self.paths))
            return
        if engine == "processes":
            self._crew.start([lambda: self._feed(len(self.paths))] * (self._processes() - 1))
            self._loop(len(self.paths), _CHUNK)
            self._wait(len(self.paths))
            return
        end = min(len(self.paths), self._taken + _ROUND)
        if engine == "alone":
            self._loop(end, _CHUNK)
            return
        if engine == "calls":
            threads, chunk = min(self._workers or _CALLERS, _CALLERS), _CHUNK
        else:
            threads = self._workers or _MAX_THREADS
            chunk = max(1, min(16, (end - self._taken) // (4 * threads)))
        self._crew.start([lambda: self._loop(end, chunk)] * threads)
        self._wait(end)

    def _probe(self) -> Engine | Literal["calls"]:
        """Do the next files alone, and say what the rest should run on."""
        first = self._taken
        wall, cpu = time.perf_counter(), time.thread_time()
        while self._taken < min(first + _PROBE_ROWS, len(self.paths)) and time.perf_counter() - wall < _PROBE_S:
            self._loop(self._taken + 8, 8)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        per_file = wall / max(1, self._taken - first)
        if wall > 0.002 and cpu < _COMPUTING * wall:
            return "threads"
        left = len(self.paths) - self._taken
        if self.work == "stat":
            # Asking a file's time costs hardly more than sending its path to another process.
            return "calls" if can_stat_together() and self._processes() > 1 and left > _CALLERS * _CHUNK else "alone"
        return "processes" if self._processes() > 1 and per_file * left > _WORTH_PROCESSES_S else "alone"

    def _processes(self) -> int:
        return min(self._workers or _MAX_PROCESSES, _MAX_PROCESSES, os.cpu_count() or 1)

    def _loop(self, end: int, chunk: int) -> None:
        while (rows := self._take(end, chunk)) is not None:
            self._keep(rows[0], *WORK[self.work](list(self.paths[slice(*rows)])))
            self._report()

    def _feed(self, end: int) -> None:
        """Let a helper process do what is left, beside others."""
        rows = None
        shares = 4 * self._processes()
        try:
            helper = self._crew.helper()
            if helper is None:
                return
            # Smaller runs towards the end, so that all finish together.
            while (rows := self._take(end, max(64, min(_HELPER_CHUNK, (end - self._taken) // shares)))) is not None:
                self._keep(rows[0], *helper.run(self.work, list(self.paths[slice(*rows)])))
        except OSError:
            # A helper that never started or died costs speed, not rows.
            if rows is not None and not self._crew.stopped:
                self._keep(rows[0], *WORK[self.work](list(self.paths[slice(*rows)])))

    def _take(self, end: int, chunk: int) -> tuple[int, int] | None:
        with self._crew.changed:
            start = self._taken
            stop = min(start + chunk, end, len(self.paths))
            if start >= stop or self._crew.stopped:
                return None
            self._taken = stop
            return start, stop

    def _keep(self, start: int, data: bytes, failures: Failures) -> None:
        rows = np.frombuffer(data, dtype=self.rows.dtype)
        with self._crew.changed:
            if self._over:
                return
            self.rows[start : start + len(rows)] = rows
            self.failures.extend((start + i, reason) for i, reason in failures)
            self.done[start : start + len(rows)] = True
            self._finished += len(rows)
            self._crew.changed.notify_all()

    def _wait(self, end: int) -> None:
        """Until all rows before `end` are finished. Helpers that were never needed are not waited for."""
        while self._finished < end:
            self._crew.wait(lambda: self._finished >= end, _REPORT_EVERY_S)
            self._report()

    def _report(self, force: bool = False) -> None:
        if self._progress is None or threading.current_thread() is not threading.main_thread():
            return
        now = time.monotonic()
        if force or now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self._progress(self._finished, len(self.paths))
