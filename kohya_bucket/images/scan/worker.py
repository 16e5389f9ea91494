"""A helper process for scans: reads runs of paths from its standard input, answers with rows.

A plain child process and not `multiprocessing`: nothing of the caller's main module is imported again, so a
script without `if __name__ == "__main__"` can scan, and no start method is assumed. Messages are a length
(8 bytes) and a pickle; both ends are this same package.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
from typing import IO, Any

from kohya_bucket.images.scan.work import WORK, Failures

__all__ = ["WorkerProcess", "serve"]

_LENGTH = struct.Struct("<q")
_READY = "ready"
_GRACE_S = 5.0


class WorkerProcess:
    """One helper process. `run` may be called from one thread at a time.

    Raises:
        OSError: the process could not be started, or has died.
    """

    def __init__(self) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise OSError("no Python executable to start a helper process with")
        start = (
            f"import sys; sys.path[:] = {[os.path.abspath(p) for p in sys.path]!r}; "
            "from kohya_bucket.images.scan.worker import serve; serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def wait_until_ready(self) -> None:
        if self._receive() != _READY:
            raise OSError("the helper process did not start")

    def run(self, work: str, paths: list[str]) -> tuple[bytes, Failures]:
        assert self._process.stdin is not None
        _send(self._process.stdin, (work, paths))
        rows, failures = self._receive()
        return rows, failures

    def close(self) -> None:
        """End the process. The pipes stay with the thread that may still be reading them."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            self._process.wait(_GRACE_S)

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        answer = _receive(self._process.stdout)
        if answer is None:
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            raise OSError("the helper process ended")
        return answer


def serve() -> None:
    """Answer requests until the other end closes. Ctrl-C is the parent's to handle."""
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    # A plugin that prints must not write between the messages.
    sys.stdout = sys.stderr
    _send(outgoing, _READY)
    while (request := _receive(incoming)) is not None:
        work, paths = request
        _send(outgoing, WORK[work](paths))


def _send(pipe: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=5)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    length = _LENGTH.unpack(head)[0]
    data = pipe.read(length)
    return pickle.loads(data) if len(data) == length else None
