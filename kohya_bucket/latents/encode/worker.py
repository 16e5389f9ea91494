"""One process' part of a precompute: it decodes, encodes and writes its share of the images.

Threads decode, resize and crop images ahead of the encoder, straight into their batches. Another thread writes encoded
batches to a sink, so that the encoder does not wait for the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.resize import require_filter, resize_and_crop, to_floats
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.items import LatentItems, Wanted, compare
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.latents.vae.encoder import BatchEncoder, Running, noise_seed

if TYPE_CHECKING:
    import torch


@dataclass
class PrecomputeReport:
    """What a run did.

    Attributes:
        output: the output folder; None: beside the images.
        total: items that have a bucket.
        current: items of this process' share that were up to date.
        encoded: items that this process encoded.
        elsewhere: items that other processes encode.
        failed: (path, reason) of images that this process could not encode.
        without_bucket: (path, reason) of images that have no bucket.
        reasons: number of items to do in this share, by reason.
        notes: for the user: smaller batches, float32 retries, images that would share a file.
        buckets: (bucket size, number of items) of everything that is there now.
        seconds: duration; `device_idle`: for how much of it no batch was in the encoder, by the device's clock.
    """

    output: str | os.PathLike[str] | None
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
    """One report of one or more runs into the same output; an image counts once for each of its runs."""
    total = PrecomputeReport(reports[0].output, 0)
    reasons, buckets = Counter[str](), Counter[tuple[int, int]]()
    for report in reports:
        for name in vars(total).keys() - {"output", "reasons", "buckets"}:
            setattr(total, name, getattr(total, name) + getattr(report, name))
        reasons.update(report.reasons)
        buckets.update(dict(report.buckets))
    total.reasons, total.buckets = dict(reasons), sorted(buckets.items())
    return total


def read_order(wanted: LatentItems) -> npt.NDArray[np.int64]:
    """[N] the items in the best order to read them, those of a bucket together."""
    sizes = wanted.bucket_sizes
    order = np.lexsort((np.arange(len(wanted)), sizes[:, 1], sizes[:, 0], wanted.images.windows()))
    return order.astype(np.int64)


def _cut(wanted: LatentItems, order: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Positions in `order` that cut it into parts of one bucket and at most `most` items, and its end."""
    alike = np.column_stack([wanted.bucket_sizes[order], wanted.images.windows()[order]])
    edges = np.flatnonzero(np.append(True, (alike[1:] != alike[:-1]).any(axis=1)))
    runs = zip(edges, [*edges[1:], len(order)], strict=True)
    return np.concatenate([*(np.arange(start, stop, most) for start, stop in runs), [len(order)]])


def shares(pixels: npt.NDArray[np.integer], batch: npt.NDArray[np.integer], processes: int) -> npt.NDArray[np.int32]:
    """[N] the process that encodes each item, by the pixels [N] and the batch number [N] of each item.

    Batches stay whole, and each goes to the process with the fewest pixels so far: so the pixels of two processes
    differ by at most one batch.
    """
    loads = np.zeros(processes)
    owner = np.zeros(int(batch.max(initial=-1)) + 1, dtype=np.int32)
    for number, added in enumerate(np.bincount(batch, weights=pixels, minlength=len(owner)).tolist()):
        owner[number] = loads.argmin()
        loads[owner[number]] += added
    return np.asarray(owner[batch])


def share_of(wanted: LatentItems, batch_size: int, rank: int, processes: int) -> npt.NDArray[np.int64]:
    """Positions of the items that process `rank` encodes, in order. It depends on the items alone, not on the store."""
    if processes == 1 or not len(wanted):
        return np.arange(len(wanted))
    order = read_order(wanted)
    begins = _cut(wanted, order, batch_size)
    batch = np.empty(len(wanted), dtype=np.int64)
    batch[order] = np.repeat(np.arange(len(begins) - 1), np.diff(begins))
    pixels = wanted.bucket_sizes.astype(np.int64).prod(axis=1)
    return np.flatnonzero(shares(pixels, batch, processes) == rank)


_MOST_IN_PIECE = 256


def pieces_of(wanted: LatentItems, batch_size: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """(name, items) of pieces of one bucket each; the name is a hash of the piece's content."""
    n, order = len(wanted), read_order(wanted)
    # Whole batches, so few in a piece that a small set makes 64 pieces or more.
    most = max(1, min(_MOST_IN_PIECE, -(-n // 64)) // batch_size) * batch_size
    begins = _cut(wanted, order, most) if n else [0]
    for start, stop in pairwise(begins):
        items = order[start:stop]
        size = tuple(wanted.bucket_sizes[items[0]])
        text = "\n".join([repr(wanted.encoding), str(size), *(wanted.sources[i] for i in items)])
        yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest(), items


Pixels = npt.NDArray[np.uint8]


@dataclass
class DecodedBatch:
    """Images of one bucket: their positions among the wanted items, pixels, and alpha masks, None where the image is
    opaque or no masks are wanted.

    Pixels are [B, H, W, 3] uint8, or with `as_floats` [B, 3, H, W] float32 in -1..1. `failed` lists (position, reason).
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
    items: Iterable[int],
    wanted: LatentItems,
    batch_size: int,
    pool: ThreadPoolExecutor,
    ahead: int,
    *,
    as_floats: bool = False,
) -> Iterator[DecodedBatch]:
    """Yield batches of consecutive `items` that share a bucket, decoding about `ahead` images in advance.

    `as_floats` converts on the threads, for encoders on the CPU; other devices get uint8, a quarter of the bytes.
    """
    require_filter(wanted.encoding.interpolation)
    ahead = max(ahead, batch_size + 1)  # so that the first batch in the queue is always complete
    filling: deque[_Filling] = deque()
    source = iter(items)

    def fill() -> None:
        """Start decoding images into the last batch, or a new one, until `ahead` of them are under way."""
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

    fill()
    while filling:
        done = filling.popleft().complete()
        fill()  # before the encoder gets the batch
        yield done


def lower_priority() -> None:
    """Let the thread that feeds the encoder run before this one, which decodes."""
    if sys.platform == "linux":  # elsewhere only processes have priorities
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def _decode(wanted: LatentItems, i: int, out: npt.NDArray[Any]) -> Pixels | None:
    """Write the pixels of item `i` into `out` [H, W, 3] uint8 or [3, H, W] float32; returns its mask."""
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


_MOST_BEHIND = 8


@dataclass
class EncodedBatch:
    """An encoded batch: positions among the wanted items, float32 latents on the CPU, masks."""

    items: list[int]
    plain: torch.Tensor
    flipped: torch.Tensor | None
    masks: list[npt.NDArray[np.uint8] | None]


class Sink(Protocol):
    """Where the latents of a process' share go. All methods are called on one thread.

    Attributes:
        notes: lines for the user before anything is encoded.
        refused: why items cannot be written, by item.
    """

    notes: list[str]
    refused: dict[int, str]

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        """[N] bool, which items must be encoded; and their number by reason."""

    def write(self, batch: EncodedBatch) -> None:
        """Take a batch."""

    def flush(self) -> None:
        """Put everything taken so far on disk."""

    def close(self) -> None:
        """End all threads; none of them touches the folder afterwards."""

    def finish(self, wanted: LatentItems) -> None:
        """Complete the output for the items of all processes."""


class Background:
    """Writes on threads of its own; the encoder waits for the disk only when several batches are behind.

    After an error in `write` nothing more is begun, and a following call here raises it.
    """

    def __init__(self, write: Callable[[Any], None], threads: int = 1) -> None:
        self._write_batch, self._failed = write, False
        self._threads = ThreadPoolExecutor(threads, "kohya-bucket-writer")
        self._behind: deque[Future[None]] = deque()

    def put(self, batch: Any) -> Future[None]:
        while self._behind and (self._behind[0].done() or len(self._behind) == _MOST_BEHIND):
            self._behind.popleft().result()
        self._behind.append(self._threads.submit(self._write, batch))
        return self._behind[-1]

    def close(self) -> None:
        """Write everything that was put, or after an error only what is being written, and end the threads."""
        try:
            while self._behind:
                self._behind.popleft().result()
        finally:
            self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; where the block raised, that error is the one to report."""
        with contextlib.nullcontext() if kind is None else contextlib.suppress(Exception):
            self.close()

    def _write(self, batch: Any) -> None:
        if not self._failed:
            try:
                self._write_batch(batch)
            except BaseException:
                self._failed = True
                raise


class StoreSink:
    """Writes a process' share of the items into a `LatentStore`; `space` is None where `write` is not used."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        wanted: Wanted,
        space: LatentSpace | None = None,
        images_root: Path | None = None,
    ) -> None:
        self.writer = StoreWriter(root, images_root=images_root)
        self.store = LatentStore(root)
        self.wanted = wanted.with_captions_of(self.store) if isinstance(wanted, LatentItems) else wanted
        self._space = space
        self.notes, self.refused = list[str](), dict[int, str]()

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        comparison = compare(self.store, self.wanted)
        return comparison.to_do, comparison.counts()

    def write(self, batch: EncodedBatch) -> None:
        assert isinstance(self.wanted, LatentItems)
        assert self._space is not None
        add_batch(self.writer, batch, self.wanted, self._space)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        pass  # it writes on its caller's thread

    def finish(self, wanted: Wanted) -> None:
        """Index the store, with changed captions and newly requested hashes, which need no encoding."""
        self.store.refresh()
        write_manifest(self.store, wanted.with_newer_texts(self.store))


def add_batch(writer: StoreWriter, batch: EncodedBatch, wanted: LatentItems, space: LatentSpace) -> None:
    """Add the items of a batch to a store."""
    encoding = wanted.encoding
    plain = _bits(batch.plain, encoding.dtype)
    flipped = None if batch.flipped is None else _bits(batch.flipped, encoding.dtype)
    masks = batch.masks if encoding.mask else None
    writer.add_rows(wanted.rows(batch.items), plain, flipped=flipped, masks=masks, space=space)


def _bits(latents: torch.Tensor, dtype: str) -> npt.NDArray[Any]:
    import torch

    latents = latents.to(getattr(torch, dtype)).contiguous()
    if dtype == "bfloat16":
        latents = latents.view(torch.int16)
    out: npt.NDArray[Any] = latents.numpy().view(carrier(dtype))
    return out


class Reporter:
    """Tells the user what happens during a run, and records it in the report; `progress` gets (done, to do)."""

    def __init__(
        self,
        report: PrecomputeReport,
        say: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.report, self._say, self._progress = report, say, progress

    def tell(self, text: str) -> None:
        self.report.notes.append(text)
        if self._say is not None:
            self._say(text)

    def fail(self, path: str, reason: str) -> None:
        why = reason.removeprefix(f"{path}: ")
        self.report.failed.append((path, why))
        self.tell(f"{path}: {why}")

    def show(self, to_do: int) -> None:
        if self._progress is not None:
            self._progress(self.report.encoded + len(self.report.failed), to_do)


def encode_missing(
    wanted: LatentItems, encode: BatchEncoder, sink: Sink, reporter: Reporter, batch_size: int, workers: int, seed: int
) -> None:
    """Encode whatever is missing or stale of a process' share. If this is interrupted, what is encoded stays."""
    report = reporter.report
    # What must be encoded, in the best order to read it.
    missing, report.reasons = sink.missing()
    to_do = int(missing.sum())
    for i, why in sink.refused.items():
        reporter.fail(wanted.paths[i], why)
    report.current = len(wanted) - to_do - len(sink.refused)
    reporter.show(to_do)
    order = read_order(wanted)
    items = iter(order[missing[order]].tolist())
    # Decoding threads, the encoder on this thread, and a writing thread, each with work in reserve.
    ahead = (encode.in_flight + 2) * batch_size + 2 * workers
    writer = Background(sink.write)
    with ThreadPoolExecutor(workers, "kohya-bucket-decode", initializer=lower_priority) as pool:
        try:
            started = time.monotonic()
            batches = prefetch(items, wanted, batch_size, pool, ahead, as_floats=encode.on_processor)
            encode_batches(wanted, encode, batches, writer.put, reporter, to_do, seed)
            report.device_idle = time.monotonic() - started - encode.busy
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:  # also after Ctrl-C: what is encoded reaches the disk
            try:
                writer.close()
                sink.flush()
            finally:
                sink.close()


def encode_batches(
    wanted: LatentItems,
    encode: BatchEncoder,
    batches: Iterable[DecodedBatch],
    put: Callable[[EncodedBatch], object],
    reporter: Reporter,
    to_do: int,
    seed: int,
) -> None:
    """Encode decoded batches and `put` the results; an interrupt still finishes what is in the encoder."""
    import torch

    begun: deque[tuple[DecodedBatch, Running]] = deque()

    def finish_first() -> None:
        batch, running = begun.popleft()
        done = encode.finish(running)
        for i, bad in zip(batch.items, done.bad, strict=True):
            if bad is not None:
                reporter.fail(wanted.paths[i], bad)
        if good := [k for k, bad in enumerate(done.bad) if bad is None]:
            flipped = None if done.flipped is None else done.flipped[good]
            items, masks = [batch.items[k] for k in good], [batch.masks[k] for k in good]
            put(EncodedBatch(items, done.plain[good], flipped, masks))
            reporter.report.encoded += len(good)

    try:
        for batch in batches:
            for i, reason in batch.failed:
                reporter.fail(wanted.paths[i], reason)
            if batch.items:
                names = [wanted.sources[i] for i in batch.items]
                seeds = [noise_seed(seed, name, wanted.collection) for name in names]
                begun.append((batch, encode.begin(torch.from_numpy(batch.pixels), seeds, names)))
            if len(begun) == encode.in_flight:
                finish_first()
            reporter.show(to_do)
    finally:
        while begun:
            finish_first()
            reporter.show(to_do)
