"""A sink on a thread of its own, so that the encoder does not wait for the disk."""

from __future__ import annotations

import queue
import threading

from kohya_bucket.latents.encode.sinks import EncodedBatch, Sink

__all__ = ["Background"]


class Background:
    """Runs a sink on one thread, so that the encoder never waits for the disk until `depth` batches are behind.

    An error of the sink is raised by the next call here.
    """

    def __init__(self, sink: Sink, depth: int = 8) -> None:
        self._sink = sink
        self._queue: queue.Queue[EncodedBatch | None] = queue.Queue(depth)
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kohya-bucket-writer", daemon=True)
        self._thread.start()

    def put(self, batch: EncodedBatch) -> None:
        self._raise()
        self._queue.put(batch)

    def drain(self) -> None:
        """Wait until everything given so far is safe on disk."""
        self._queue.join()
        self._flush()

    def _flush(self) -> None:
        self._raise()
        try:
            self._sink.flush()
        except BaseException as error:
            self._problem = error  # so that nothing more is begun
            raise

    def close(self) -> None:
        """Finish what was given, or after an error what is being written, and end all threads.

        Errors that nobody saw yet are raised.
        """
        try:
            self._queue.put(None)
            self._thread.join()
            self._flush()
        finally:
            self._sink.close()

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            try:
                if batch is None:
                    return
                if self._problem is None:
                    self._sink.write(batch)
            except BaseException as error:
                self._problem = error
            finally:
                self._queue.task_done()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem
