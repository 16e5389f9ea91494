"""A function applied to many files: alone, on threads, on processes or on a Ray cluster, as measured.

On a warm local disk a thread is limited by the interpreter, and more threads only slow it down; on a slow or remote
disk nearly all time is waiting, and many threads wait in parallel. So the first files are done alone, to measure the
share of computing. Rows go straight into preallocated arrays, so finished ones survive an interrupt.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import explain_os_error
from kohya_bucket.images.parallel import Engine, Progress, for_each
from kohya_bucket.images.remote import is_url, stat_remote
from kohya_bucket.images.scan_worker import Answer, Helper, Look, ask

_PROBE_ROWS = 64
_PROBE_S = 0.02
_CHUNK = 1024
_RAY_CHUNK = 2048
# After this many rows the choice is made again: a cold disk may have become warm.
_ROUND = 1 << 17
_MAX_THREADS = 48
_MAX_PROCESSES = 8
_COMPUTING = 0.3
_WORTH_PROCESSES_S = 0.5
_SENDING_S = 4e-6  # per path; faster functions, such as `os.stat`, gain nothing from another process
_REPORT_EVERY_S = 0.1


class ScanTask(NamedTuple):
    """A function for each file, and the numpy columns of its result."""

    look: Look
    columns: list[tuple[str, str]]


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        if not is_url(path):
            raise
        return stat_remote(path)
    return status.st_mtime_ns, status.st_size


STAT = ScanTask(_stat, [("mtime_ns", "i8"), ("bytes", "i8")])
ABSENT = [explain_os_error(error) for error in (FileNotFoundError(), NotADirectoryError(20, os.strerror(20)))]
"""Reasons of its failures where there is no file; with all others there may be one."""


class Job:
    """A task for N paths; finished rows are in `rows`, `done` and `failures`.

    Attributes:
        rows: [N] structured array of the task's columns, zero where it failed.
        done: [N] bool, the finished rows.
        failures: reasons, by index.
    """

    def __init__(
        self,
        task: ScanTask,
        paths: Sequence[str],
        *,
        workers: int | None = None,
        engine: Engine = "auto",
        progress: Progress | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise KohyaBucketError(f"workers is {workers}, but must be 1 or more; leave it out for as many as help")
        self.paths = paths
        self.rows: npt.NDArray[Any] = np.zeros(len(paths), dtype=task.columns)
        self.done: npt.NDArray[np.bool_] = np.zeros(len(paths), dtype=bool)
        self.failures: dict[int, str] = {}
        self._look = task.look
        self._nothing = np.zeros((), self.rows.dtype).item()
        self._engine = "alone" if workers == 1 and engine == "auto" else engine
        self._workers = workers
        self._progress = progress
        self._reported = 0.0
        self._finished = 0

    def run(self) -> Job:
        """Do everything. On KeyboardInterrupt finished rows stay, and the caller gets the interrupt."""
        with warnings.catch_warnings():
            # Once, for all threads: Pillow warns about every large or slightly damaged image.
            warnings.simplefilter("ignore")
            while self._finished < len(self.paths):
                self._round()
        self._report(force=True)
        return self

    def _round(self) -> None:
        engine = self._probe() if self._engine == "auto" else self._engine
        start, n = self._finished, len(self.paths)
        if start >= n:
            return
        # Ray and helper processes do all that is left; threads and this thread at most a round, after which the choice
        # is made again.
        if engine == "ray":
            runs = _runs(start, n, _RAY_CHUNK)
            answers = for_each(partial(ask, self._look), [list(self.paths[run]) for run in runs], "ray")
            for run, rows in zip(runs, answers, strict=True):
                self._keep(run, rows)
        elif engine == "processes" and (helpers := self._processes() - 1):
            chunk = max(64, min(_CHUNK, (n - start) // (8 * helpers + 8)))
            self._on_helpers(_runs(start, n, chunk), helpers)
        elif engine == "threads":
            end, threads = min(n, start + _ROUND), self._workers or _MAX_THREADS
            chunk = max(1, min(16, (end - start) // (4 * threads)))
            self._spread(_runs(start, end, chunk), threads, self._here)
        else:
            for run in _runs(start, min(n, start + _ROUND), _CHUNK):
                self._keep(run, self._here(run))

    def _probe(self) -> Engine:
        """Do the next files alone, and choose the engine for the others by how long they took."""
        first, left = self._finished, len(self.paths) - self._finished
        wall, cpu = time.perf_counter(), time.thread_time()
        for run in _runs(first, first + min(_PROBE_ROWS, left), 8):
            self._keep(run, self._here(run))
            if time.perf_counter() - wall > _PROBE_S:
                break
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        if wall > 0.002 and cpu < _COMPUTING * wall:
            return "threads"
        each = wall / max(1, self._finished - first)
        worth = each > _SENDING_S and each * left > _WORTH_PROCESSES_S and self._processes() > 1
        return "processes" if worth else "alone"

    def _processes(self) -> int:
        return min(self._workers or _MAX_PROCESSES, _MAX_PROCESSES, os.cpu_count() or 1)

    def _here(self, run: slice) -> list[Answer]:
        return ask(self._look, list(self.paths[run]))

    def _on_helpers(self, runs: list[slice], count: int) -> None:
        """Do all runs in `count` helper processes, each driven by a thread, and in this thread."""
        thread, closing = threading.local(), threading.Event()
        helpers: list[Helper] = []

        def by_helper(run: slice) -> list[Answer]:
            paths = list(self.paths[run])
            try:
                if not hasattr(thread, "helper"):
                    thread.helper = None  # if it cannot be started, this thread does all its rows itself
                    thread.helper = Helper()
                    helpers.append(thread.helper)
                    if closing.is_set():  # too late for the loop that closes all helpers
                        thread.helper.close()
                if thread.helper is not None:
                    return list(thread.helper.ask(self._look, paths))
            except (OSError, EOFError, pickle.UnpicklingError):
                thread.helper = None
            if closing.is_set():  # it died because the job ends
                raise InterruptedError
            return ask(self._look, paths)

        try:
            self._spread(runs, count, by_helper, join_in=True)
        finally:
            closing.set()
            for helper in helpers:
                helper.close()

    def _spread(
        self, runs: list[slice], threads: int, do: Callable[[slice], list[Answer]], join_in: bool = False
    ) -> None:
        """Do all runs on threads; with `join_in` this thread does some of them too, from the end."""
        pool = ThreadPoolExecutor(threads, "kohya-bucket-scan")
        waiting: deque[tuple[Future[list[Answer]], slice]] = deque()
        try:
            waiting.extend((pool.submit(do, run), run) for run in runs)
            # Keep results in order from the front; meanwhile take runs that no thread has begun from the back.
            while waiting:
                first, run = waiting[0]
                if first.done():
                    self._keep(run, first.result())
                    waiting.popleft()
                elif join_in and waiting[-1][0].cancel():
                    run = waiting.pop()[1]
                    self._keep(run, self._here(run))
                else:
                    wait([first], _REPORT_EVERY_S)  # Windows delivers Ctrl-C only between waits
                    self._report()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for future, run in waiting:  # after an interrupt
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._keep(run, future.result(), report=False)

    def _keep(self, run: slice, answers: list[Answer], report: bool = True) -> None:
        failed = [i for i, answer in enumerate(answers) if isinstance(answer, str)]
        for i in failed:
            self.failures[run.start + i] = str(answers[i])
            answers[i] = self._nothing
        self.rows[run] = answers
        self._finished += len(answers) - int(self.done[run].sum())
        self.done[run] = True
        if report:
            self._report()

    def _report(self, force: bool = False) -> None:
        if self._progress is None or threading.current_thread() is not threading.main_thread():
            return
        now = time.monotonic()
        if force or now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self._progress(self._finished, len(self.paths))


def _runs(start: int, end: int, chunk: int) -> list[slice]:
    return [slice(at, min(at + chunk, end)) for at in range(start, end, chunk)]
