"""One pipeline under every caching: `source → read ahead → batch → encode → keep`.

- `Reader`: threads read items ahead of the encoder, as far as memory allows, and neighbours of one shape are a batch.
- `Caching`: the encoder runs on the thread that caches, and what it makes is kept on others meanwhile. What a user is
  told on the way, and how it ends on Ctrl-C, is the same wherever something is cached.

A caching brings what is its own: how an item is read, what encodes a batch, and how the result is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from kohya_bucket.checks import is_first_process
from kohya_bucket.texts import counted

Item = TypeVar("Item")
Read = TypeVar("Read")
Batch = TypeVar("Batch")

_MOST_AHEAD = 2 << 30  # bytes of what is read ahead
_MOST_BEHIND = 8  # batches that wait to be kept
_FIRST_LINE, _NEXT_LINES = 10.0, 60.0  # seconds after which the time that is left is said, and again
_PATIENCE = 1.0  # seconds after Ctrl-C in which the thread that caches has to come out of the encoder

logger = logging.getLogger("kohya_bucket")


@contextlib.contextmanager
def threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads that give way to the encoder's; where the block ends half-way, nobody waits for them."""
    pool = ThreadPoolExecutor(count, f"kohya-bucket-{name}", initializer=_lower_priority)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere only processes have priorities
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


@dataclass
class Reader(Generic[Item, Read]):
    """Reads items on threads, in order, and puts neighbours of one shape together.

    Attributes:
        read: what an item is made of; runs on a thread.
        shape: what the items of a batch have in common.
        most: how many items of a shape go together, asked whenever a batch begins.
        nbytes: that an item takes while and after it is read.
        failed: told of an item that could not be read; whether to try it once more, after all others. It may raise.
        further: how many items are read beyond those of the batch that is asked for.
    """

    read: Callable[[Item], Read]
    shape: Callable[[Item], Hashable]
    most: Callable[[Any], int]
    nbytes: Callable[[Item], int]
    failed: Callable[[Item, Exception], bool]
    further: int

    def ahead(self, items: Iterable[Item], pool: ThreadPoolExecutor) -> Iterator[tuple[Item, Read]]:
        """Items and what was read of them, one by one."""
        for batch, reads in self.batches(items, pool):
            yield from zip(batch, reads, strict=True)

    def batches(self, items: Iterable[Item], pool: ThreadPoolExecutor) -> Iterator[tuple[list[Item], list[Read]]]:
        """Batches as they are asked for; what the next one lacks, and a few items beyond it, are read beforehand."""
        source, again = iter(items), deque[Item]()
        reading = deque[tuple[Item, Hashable, int, "Future[Read]"]]()

        def read_ahead(most: int) -> None:
            held = sum(nbytes for _, _, nbytes, _ in reading)
            while len(reading) < most + self.further and (not reading or held < _MOST_AHEAD):
                item = next(source, None)
                if item is None:
                    if not again:
                        return
                    item = again.popleft()
                nbytes = self.nbytes(item)
                reading.append((item, self.shape(item), nbytes, pool.submit(self.read, item)))
                held += nbytes

        read_ahead(1)
        while reading:
            shape = reading[0][1]
            most = self.most(shape)
            batch, reads = list[Item](), list[Read]()
            while reading and reading[0][1] == shape and len(batch) < most:
                item, _, _, future = reading.popleft()
                read_ahead(most)
                try:
                    reads.append(future.result())
                except CancelledError:  # the run ends half-way
                    return
                except MemoryError:
                    raise
                except Exception as error:  # whatever a reader raises at what it does not expect
                    if self.failed(item, error):
                        again.append(item)
                        read_ahead(most)
                else:
                    batch.append(item)
            if batch:
                yield batch, reads
            read_ahead(1)


class Background:
    """Runs `work` on threads of its own; who puts something waits only when `most` are behind.

    After an error in `work` nothing more is begun, and what follows here raises it.
    """

    def __init__(self, work: Callable[[Any], object], threads: int = 1, most: int = _MOST_BEHIND) -> None:
        self._work, self._most = work, max(most, threads)
        self._error: BaseException | None = None
        self._threads = ThreadPoolExecutor(threads, "kohya-bucket-writer")
        self._behind: deque[Future[None]] = deque()
        self.is_closed = False

    def put(self, what: Any) -> None:
        while self._behind and (self._behind[0].done() or len(self._behind) >= self._most):
            self._first()
        self._refuse_after_error()
        self._behind.append(self._threads.submit(self._run, what))

    def finish(self) -> None:
        """Wait for everything that was put; after an error for nothing."""
        while self._behind:
            self._first()
        self._refuse_after_error()

    def _first(self) -> None:
        wait([self._behind[0]])  # an interrupt here leaves it to be waited for
        self._behind.popleft().result()

    def _refuse_after_error(self) -> None:
        if self._error is not None:  # whoever met it may have gone on
            raise self._error

    def is_done(self, seconds: float) -> bool:
        """Whether nothing is behind any more, at the latest after some seconds."""
        return not wait(self._behind, seconds).not_done

    def close(self) -> None:
        """`finish`, and end the threads, after an error too. After an interrupt another call goes on with it."""
        if self.is_closed:
            return
        try:
            self.finish()
        finally:
            if self._error is not None or not self._behind:
                self._behind.clear()  # what is taken back never ends
                self._threads.shutdown(cancel_futures=True)
                self.is_closed = True

    def _run(self, what: Any) -> None:
        if self._error is None:
            try:
                self._work(what)
            except BaseException as error:
                self._error = error
                raise


class Caching:
    """One caching of images or captions, from the first to the last, or to where it is interrupted.

    On Ctrl-C the interrupt's text says how much is kept; a second Ctrl-C ends the process at once, as a kill would.

    Args:
        what: one of what is cached, e.g. "image".
        to_do: how many are to be encoded.
        current: how many more there are, which need no encoding.
        keep: keeps what was put, on a thread of its own; it may give how many that were, where it stops half-way.
        flush: puts on disk what `keep` has not, behind it; None: `keep` puts all there.
        stays: what is kept is there after the run.
        writers: threads that keep; `behind`: how many may wait to be kept.
        processes: that cache, each its share.
        say: called with a line for the user; None: the log of the first process.

    Attributes:
        encoded, kept, pixels: how many items so far, and of how many pixels those that are encoded are.
        busy: seconds that the encoder ran.
        stopped: the run ends half-way.
    """

    def __init__(
        self,
        what: str,
        to_do: int,
        current: int = 0,
        *,
        keep: Callable[[Any], int | None],
        flush: Callable[[], object] | None = None,
        stays: bool = True,
        writers: int = 1,
        behind: int = _MOST_BEHIND,
        processes: int = 1,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.what, self.to_do, self.current, self._processes = what, to_do, current, processes
        self.encoded = self.kept = self.pixels = 0
        self.busy, self.stopped = 0.0, False
        self._keep, self._flush, self._stays, self._say = keep, flush, stays, say or _log
        self._writer = Background(self._kept, writers, behind)
        self._began = time.monotonic()
        self._next_line = self._began + _FIRST_LINE
        self._ending = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[Caching]:
        """At the end of the block everything that was put is kept, also where the block raises."""
        with _watching_interrupts(self._end_here):
            try:
                try:
                    yield self
                except KeyboardInterrupt:
                    raise
                except BaseException:
                    self.stopped = True
                    with contextlib.suppress(Exception):  # the error that ends the run is the one to report
                        self._finish()
                    raise
                self._finish()
            except KeyboardInterrupt as interrupt:
                self.end(interrupt)
                raise

    def end(self, interrupt: KeyboardInterrupt) -> None:
        """On Ctrl-C: keep what was put, and let the interrupt say so."""
        with self._ending:
            self._stop()
            interrupt.args = tuple(filter(None, [self.say_kept()]))

    @staticmethod
    def ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
        """Batches, of which the next one is made on another thread while one is encoded."""
        with threads(1, "stage") as stage:
            following = stage.submit(next, batches, None)
            while (batch := following.result()) is not None:
                following = stage.submit(next, batches, None)
                yield batch

    def put(self, made: Any, count: int, pixels: int = 0) -> None:
        """What was made of so many items is kept from here on."""
        self._writer.put((made, count))
        self.encoded += count
        self.pixels += pixels
        self._say_time_left()

    def finish(self) -> None:
        """Wait until everything that was put is kept."""
        self._writer.finish()

    def _kept(self, work: tuple[Any, int]) -> None:
        made, count = work
        kept = self._keep(made)
        self.kept += count if kept is None else kept

    def _finish(self) -> None:
        try:
            self._writer.close()
        finally:
            if self._flush is not None and self._writer.is_closed:
                self._flush()

    def _stop(self) -> None:
        """After Ctrl-C: what was put is kept, but nobody waits for long, unless what is kept would be lost."""
        self.stopped = True
        if not self._writer.is_done(_PATIENCE) and self._flush is None:
            self._end_process()
        with contextlib.suppress(Exception):
            self._finish()

    # -- for the user --------------------------------------------------------------------------------

    def _say_time_left(self) -> None:
        """After the first batches; where there is no bar, since nobody looks, now and then again."""
        now, left = time.monotonic(), self.to_do - self.encoded
        if left <= 0 or now < self._next_line or not self.encoded:
            return
        self._next_line = float("inf") if sys.stderr is not None and sys.stderr.isatty() else now + _NEXT_LINES
        seconds = (now - self._began) * left / self.encoded
        wait = f"{seconds / 3600:.1f} h" if seconds > 7200 else f"{seconds / 60:.0f} min" if seconds > 120 else ""
        pixels = f" ({self.pixels / 1e6:,.0f} megapixels)" if self.pixels else ""
        self._say(
            f"{self.encoded:,} of {counted(self.to_do, self.what)}{pixels} encoded; the others take about "
            f"{wait or f'{seconds:.0f} s'}"
        )

    def say_speed(self) -> None:
        """How fast it was, once it is done."""
        if self.encoded:
            seconds = max(time.monotonic() - self._began, 1e-9)
            ran = f"; the encoder ran {100 * self.busy / seconds:.0f}% of the time" if self.busy else ""
            rate = self.encoded / seconds
            self._say(
                f"{counted(self.encoded, self.what, 'was', 'were')} encoded in {seconds:.1f} s: {rate:.1f}/s{ran}"
            )

    def say_kept(self) -> str:
        """What an interrupt leaves, in words; nothing where nothing stays."""
        if not self._stays:
            return ""
        whose = " of this process" if self._processes > 1 else ""
        total = counted(self.current + self.to_do, self.what)
        return f"{self.current + self.kept:,} of {total}{whose} kept; the same command goes on"

    def _end_here(self) -> None:
        """End the process from another thread, while the one that caches is inside of the encoder."""
        if self._ending.acquire(blocking=False):  # else it came out of it
            self._stop()
            self._end_process()

    def _end_process(self) -> NoReturn:
        print(f"kohya_bucket: {self.say_kept() or 'interrupted'}", file=sys.stderr, flush=True)
        os._exit(_INTERRUPTED)


_INTERRUPTED = 130


def _log(line: str) -> None:
    if is_first_process():
        logger.info("%s", line)


@contextlib.contextmanager
def _watching_interrupts(end: Callable[[], None]) -> Iterator[None]:
    """Python acts on Ctrl-C when the main thread comes out of the library that it is in, which may take minutes.

    Another thread learns of it at once: it calls `end` where that takes long, and ends the process on a second one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    heard, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        interrupts = 0
        with heard:
            while True:
                try:
                    numbers = heard.recv(64)
                except TimeoutError:
                    heard.settimeout(None)
                    end()
                    continue
                if not numbers:
                    return
                interrupts += numbers.count(signal.SIGINT)
                if interrupts > 1:
                    os._exit(_INTERRUPTED)
                if interrupts:
                    heard.settimeout(_PATIENCE)

    watcher = threading.Thread(target=watch, name="kohya-bucket-interrupts", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        told.close()
        watcher.join()
