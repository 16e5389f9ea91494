"""One process' part of a precompute: its share of the images is decoded, encoded and written behind the encoder.

Images are decoded, resized and cropped on threads, ahead of the encoder, straight into the batches they belong to.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.resize import resize_and_crop, to_floats
from kohya_bucket.latents.encode.sinks import Background, EncodedBatch, Sink
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.store.remote_path import StorePath
from kohya_bucket.latents.vae.encoder import BatchEncoder, Encoded, VAEEncoder, noise_seed


@dataclass
class PrecomputeReport:
    """What a run did.

    Attributes:
        output: the store's folder, or of the npz files (None: beside the images).
        total: items that have a bucket.
        current: of this process' share, how many were there already.
        encoded: encoded by this process.
        elsewhere: items that are other processes' to encode.
        failed: (path, reason) of images this process could not encode.
        without_bucket: (path, reason) of images that have no bucket.
        reasons: how many items of the share were to do, by reason.
        notes: what a user should know: smaller batches, float32 retries, images that would share a file.
        buckets: (bucket size, number of items) of everything that is there now.
        seconds: how long it took; `device_idle`: how much of that no batch was in the encoder.
    """

    output: StorePath | None
    total: int
    current: int = 0
    encoded: int = 0
    elsewhere: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    without_bucket: list[tuple[str, str]] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    buckets: list[tuple[tuple[int, int], int]] = field(default_factory=list)
    seconds: float = 0.0
    device_idle: float = 0.0


def joined(reports: Sequence[PrecomputeReport]) -> PrecomputeReport:
    """One report of several runs into the same place, one or more; an image counts once for each run it was in."""
    both = PrecomputeReport(reports[0].output, 0)
    reasons, buckets = Counter[str](), Counter[tuple[int, int]]()
    for report in reports:
        for name in vars(both).keys() - {"output", "reasons", "buckets"}:
            setattr(both, name, getattr(both, name) + getattr(report, name))
        reasons.update(report.reasons)
        buckets.update(dict(report.buckets))
    both.reasons, both.buckets = dict(reasons), sorted(buckets.items())
    return both


def read_order(wanted: LatentItems) -> npt.NDArray[np.int64]:
    """[N] the items in the order in which they are best read, neighbours in one bucket."""
    sizes = wanted.bucket_sizes
    order = np.lexsort((np.arange(len(wanted)), sizes[:, 1], sizes[:, 0], wanted.images.windows()))
    return order.astype(np.int64)


def _cut(wanted: LatentItems, order: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Where in `order` parts begin that have one bucket and at most `most` items, and the end."""
    alike = np.column_stack([wanted.bucket_sizes[order], wanted.images.windows()[order]])
    edges = np.flatnonzero(np.append(True, (alike[1:] != alike[:-1]).any(axis=1)))
    runs = zip(edges, [*edges[1:], len(order)], strict=True)
    return np.concatenate([*(np.arange(start, stop, most) for start, stop in runs), [len(order)]])


def shares(pixels: npt.NDArray[np.integer], batch: npt.NDArray[np.integer], processes: int) -> npt.NDArray[np.int32]:
    """[N] which of the processes encodes each item. Batches stay whole; the next one goes to who has the fewest pixels.

    So the pixels of two processes differ by those of one batch at most.

    Args:
        pixels: [N] of each item.
        batch: [N] number of its batch, from 0 on.
        processes: how many there are.
    """
    loads = [(0.0, process) for process in range(processes)]
    owner = np.zeros(int(batch.max(initial=-1)) + 1, dtype=np.int32)
    for number, added in enumerate(np.bincount(batch, weights=pixels, minlength=len(owner)).tolist()):
        load, process = loads[0]
        owner[number] = process
        heapq.heapreplace(loads, (load + added, process))
    return np.asarray(owner[batch])


def share_of(wanted: LatentItems, batch_size: int, rank: int, processes: int) -> npt.NDArray[np.int64]:
    """Positions of the items that process `rank` encodes, in order. It depends on the items alone, not on the disk."""
    if processes == 1 or not len(wanted):
        return np.arange(len(wanted))
    order = read_order(wanted)
    begins = _cut(wanted, order, batch_size)
    batch = np.empty(len(wanted), dtype=np.int64)
    batch[order] = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    pixels = wanted.bucket_sizes.astype(np.int64).prod(axis=1)
    return np.flatnonzero(shares(pixels, batch, processes) == rank)


_MOST = 256


def pieces_of(wanted: LatentItems, batch_size: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """(name, items) of pieces that each have one bucket; the name is a hash of what is in it."""
    n, order = len(wanted), read_order(wanted)
    begins = _cut(wanted, order, max(batch_size, min(_MOST, -(-n // 64)) // batch_size * batch_size)) if n else [0]
    for start, stop in pairwise(begins):
        items = order[start:stop]
        size = tuple(wanted.bucket_sizes[items[0]])
        text = "\n".join([repr(wanted.encoding), str(size), *(wanted.sources[i] for i in items)])
        yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest(), items


Pixels = npt.NDArray[np.uint8]
_NICENESS = 5


@dataclass
class DecodedBatch:
    """Images of one bucket: positions among the wanted ones, pixels, and alpha masks.

    Pixels are [B, H, W, 3] uint8, or with `as_floats` [B, 3, H, W] float32 in -1..1.

    A mask is None where the image is opaque or masks were not asked for. `failed` lists (position, reason) of
    images that could not be read.
    """

    items: list[int]
    pixels: npt.NDArray[Any] | None
    masks: list[Pixels | None]
    failed: list[tuple[int, str]]


@dataclass
class _Filling:
    """A batch whose images are being decoded into their rows of `pixels`."""

    bucket: tuple[int, int]
    pixels: npt.NDArray[Any]
    items: list[int] = field(default_factory=list)
    running: list[Future[Pixels | None]] = field(default_factory=list)

    def complete(self) -> DecodedBatch:
        """Wait for all of its images."""
        rows, masks, failed = [], [], []
        for row, (i, future) in enumerate(zip(self.items, self.running, strict=True)):
            try:
                masks.append(future.result())
                rows.append(row)
            except KohyaBucketError as error:
                failed.append((i, str(error)))
        n = len(self.items)
        pixels = self.pixels[:n] if len(rows) == n else self.pixels[rows]
        return DecodedBatch([self.items[row] for row in rows], pixels if rows else None, masks, failed)


def prefetch(
    items: Iterable[int], wanted: LatentItems, batch_size: int, pool: ThreadPoolExecutor, ahead: int,
    *, as_floats: bool = False,
) -> Iterator[DecodedBatch]:  # fmt: skip
    """Yield batches of neighbours in `items` that share a bucket, decoding about `ahead` images beforehand.

    `as_floats` makes the floats here, on the threads, for encoders that run on the processor; for others four
    times as few bytes go to the device.
    """
    ahead = max(ahead, batch_size + 1)  # so that the first batch is never one that could still grow
    filling: deque[_Filling] = deque()
    source = iter(items)

    def start() -> None:
        running = sum(len(batch.items) for batch in filling)
        while running < ahead and (i := next(source, None)) is not None:
            bucket = width, height = as_pair(wanted.bucket_sizes[i])
            if not filling or filling[-1].bucket != bucket or len(filling[-1].items) == batch_size:
                shape = (batch_size, 3, height, width) if as_floats else (batch_size, height, width, 3)
                filling.append(_Filling(bucket, np.empty(shape, np.float32 if as_floats else np.uint8)))
            batch = filling[-1]
            batch.running.append(pool.submit(_decode, wanted, i, batch.pixels[len(batch.items)]))
            batch.items.append(i)
            running += 1

    start()
    while filling:
        done = filling.popleft().complete()
        start()
        yield done


def give_way() -> None:
    """Let the thread that feeds the encoder go before this one, where all processors are busy decoding."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _decode(wanted: LatentItems, i: int, out: npt.NDArray[Any]) -> Pixels | None:
    """Put the pixels of item `i` into `out` [H, W, 3] uint8 or [3, H, W] float32; returns its mask."""
    alpha = wanted.encoding.mask
    pixels = wanted.images.pixels(i, alpha)
    width, height = wanted.original_sizes[i]
    if pixels.shape[:2] != (height, width):
        raise KohyaBucketError(
            f"{wanted.paths[i]}: has {pixels.shape[1]}x{pixels.shape[0]} pixels, but {width}x{height} when its bucket "
            "was chosen; if it was just edited, run again"
        )
    resized, bucket, crop = (as_pair(sizes[i]) for sizes in (wanted.resized_sizes, wanted.bucket_sizes, wanted.crops))
    pixels = resize_and_crop(pixels, resized, bucket, wanted.encoding.interpolation, crop)
    mask = np.ascontiguousarray(pixels[:, :, 3]) if alpha and (pixels[:, :, 3] != 255).any() else None
    if out.dtype == np.uint8:
        out[...] = pixels[:, :, :3]
    else:
        to_floats(pixels, out)
    return mask


class PrecomputeWorker:
    """The state of one process' run.

    Args:
        wanted: its share of the items.
        workers: threads that decode.
    """

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
        self._to_do = 0

    def tell(self, text: str) -> None:
        """Say what a user should know, now and in the report."""
        self.report.notes.append(text)
        if self._say is not None:
            self._say(text)

    def through(self, sink: Sink) -> None:
        """Do everything that is to do. What is encoded when this is interrupted stays."""
        to_do, self.report.reasons = sink.missing()
        self._to_do = int(to_do.sum())
        self.report.current = len(self.wanted) - self._to_do
        self._show()
        order = read_order(self.wanted)
        items = iter(order[to_do[order]].tolist())
        ahead = 3 * self._batch_size + 2 * self._workers
        writer = Background(sink)
        with ThreadPoolExecutor(self._workers, "kohya-bucket-decode", initializer=give_way) as pool:
            try:
                started = time.monotonic()
                floats = self._encode.on_processor
                self.encode(prefetch(items, self.wanted, self._batch_size, pool, ahead, as_floats=floats), writer.put)
                self.report.device_idle = time.monotonic() - started - self._encode.busy
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                writer.close()

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
            why = reason.removeprefix(f"{path}: ")
            self.report.failed.append((path, why))
            self.tell(f"{path}: {why}")

    def _show(self) -> None:
        if self._progress is not None:
            self._progress(self.report.encoded + len(self.report.failed), self._to_do)
