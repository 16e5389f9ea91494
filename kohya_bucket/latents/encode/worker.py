"""One process' part of a precompute: pieces of work are claimed, decoded, encoded and written behind the encoder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.encode.background import Background
from kohya_bucket.latents.encode.batch_encoder import BatchEncoder, noise_seed
from kohya_bucket.latents.encode.pieces import pieces_of
from kohya_bucket.latents.encode.prefetch import DecodedBatch, give_way, prefetch
from kohya_bucket.latents.encode.report import PrecomputeReport
from kohya_bucket.latents.encode.sinks import EncodedBatch, Sink
from kohya_bucket.latents.encode.work_claims import WorkBoard
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.vae.encoder import VAEEncoder

if TYPE_CHECKING:
    from kohya_bucket.latents.encode.batch_encoder import Encoded

__all__ = ["PrecomputeWorker"]


class PrecomputeWorker:
    """The state of one process' run: what is to do, what is done, and who waits for what."""

    def __init__(
        self, wanted: LatentItems, encoder: VAEEncoder | BatchEncoder, batch_size: int, report: PrecomputeReport,
        say: Callable[[str], None] | None, progress: Callable[[int, int], None] | None, workers: int, seed: int,
    ) -> None:  # fmt: skip
        self.wanted = wanted
        self.report = report
        self._batch_size = batch_size
        if not isinstance(encoder, BatchEncoder):
            encoder = BatchEncoder(encoder, wanted.encoding.kind, wanted.encoding.flip, self.tell)
        self._encode = encoder
        self._say = say
        self._progress = progress
        self._workers = workers
        self._seed = seed
        self._lock = threading.Lock()
        self._chunk_of: dict[int, str] = {}
        self._open: dict[str, int] = {}
        self._board: WorkBoard | None = None
        self._to_do = 0
        self._sizes: dict[str, int] = {}

    def tell(self, text: str) -> None:
        """Say what a user should know, now and in the report."""
        self.report.notes.append(text)
        if self._say is not None:
            self._say(text)

    def safe(self, items: Sequence[int]) -> None:
        """Called when items are safe on disk, or never will be: closes chunks that have none left."""
        finished = []
        with self._lock:
            for i in items:
                chunk = self._chunk_of.pop(i, None)
                if chunk is not None:
                    self._open[chunk] -= 1
                    if not self._open[chunk]:
                        finished.append(chunk)
        for chunk in finished:
            if self._board is not None:
                self._board.finish(chunk)

    def through(self, sink: Sink, board: WorkBoard) -> None:
        """Do everything that is to do, together with whoever else is at it."""
        self._board = board
        wanted = self.wanted
        to_do, self.report.reasons = sink.missing()
        self.report.current = len(wanted) - int(to_do.sum())
        chunks = {name: items for name, items in pieces_of(wanted, self._batch_size) if to_do[items].any()}
        self._sizes = {name: int(to_do[items].sum()) for name, items in chunks.items()}
        self._to_do = int(to_do.sum())
        self._show()
        writer = Background(sink)
        with ThreadPoolExecutor(self._workers, "kohya-bucket-decode", initializer=give_way) as pool:
            try:
                turn: Iterator[str] = board.claim_each(list(chunks))
                while True:
                    self._work(turn, chunks, sink, writer, pool)
                    writer.drain()
                    taken = board.take_over(list(chunks))
                    self._show()
                    if not taken:
                        break
                    turn = iter(taken)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                writer.close()
        self.report.elsewhere = max(0, self._to_do - self.report.encoded - len(self.report.failed))

    def _work(
        self, turn: Iterator[str], chunks: dict[str, npt.NDArray[np.int64]], sink: Sink,
        writer: Background, pool: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        def items() -> Iterator[int]:
            for chunk in turn:
                left = sink.to_do(chunks[chunk])
                with self._lock:
                    self._open[chunk] = len(left)
                    self._chunk_of.update(dict.fromkeys(left.tolist(), chunk))
                if not len(left) and self._board is not None:
                    self._board.finish(chunk)
                yield from left.tolist()

        ahead = 3 * self._batch_size + 2 * self._workers
        floats = self._encode.on_processor
        started, busy = time.monotonic(), self._encode.busy
        self.encode(prefetch(items(), self.wanted, self._batch_size, pool, ahead, as_floats=floats), writer.put)
        self.report.device_idle += time.monotonic() - started - (self._encode.busy - busy)

    def encode(self, batches: Iterable[DecodedBatch], put: Callable[[EncodedBatch], None]) -> None:
        """Encode what has been decoded; `put` takes what came of it."""
        for batch in batches:
            self._fail(batch.failed)
            if batch.items:
                self._one(batch, put)
            self._show()

    def _one(self, batch: DecodedBatch, put: Callable[[EncodedBatch], None]) -> None:
        import torch

        names = [self.wanted.sources[i] for i in batch.items]
        seeds = [noise_seed(self._seed, name, self.wanted.encoding.collection) for name in names]
        done: Encoded = self._encode(torch.from_numpy(batch.pixels), seeds, names)
        self._fail([(i, bad) for i, bad in zip(batch.items, done.bad, strict=True) if bad is not None])
        good = [k for k, bad in enumerate(done.bad) if bad is None]
        if good:
            flipped = None if done.flipped is None else done.flipped[good]
            items, masks = [batch.items[k] for k in good], [batch.masks[k] for k in good]
            put(EncodedBatch(items, done.plain[good], flipped, masks))
            self.report.encoded += len(good)

    def _fail(self, failed: Sequence[tuple[int, str]]) -> None:
        for i, reason in failed:
            path = self.wanted.paths[i]
            self.report.failed.append((path, reason.removeprefix(f"{path}: ")))
            self.tell(f"{path}: {reason.removeprefix(f'{path}: ')}")
        self.safe([i for i, _ in failed])

    def _show(self) -> None:
        if self._progress is None or self._board is None:
            return
        mine = self.report.encoded + len(self.report.failed)
        others = sum(
            self._sizes[chunk] for chunk in self._board.finished_pieces() if chunk in self._sizes.keys() - self._open
        )
        self._progress(min(mine + others, self._to_do), self._to_do)
