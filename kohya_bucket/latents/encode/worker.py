"""One process' part of a precompute: it decodes, encodes and writes its share of the images.

Threads decode, resize and crop images ahead of the encoder. Another thread writes encoded batches to a sink, so that
the encoder does not wait for the disk (`pipeline.py`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import KohyaBucketError, may_pass
from kohya_bucket.images.resize import require_filter, resize_and_crop, to_floats
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.encode.pipeline import Caching, Reader, threads
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


Pixels = npt.NDArray[Any]  # [H, W, 3] uint8, or [3, H, W] float32 in -1..1
Mask = npt.NDArray[np.uint8] | None  # [H, W]; None where an image is opaque or no masks are wanted
Decoded = tuple[Pixels, Mask]


@dataclass
class DecodedBatch:
    """Images of one bucket: their positions among the wanted items, pixels as one array, and masks."""

    items: list[int]
    pixels: Pixels
    masks: list[Mask]


def decode_ahead(
    items: Iterable[int],
    wanted: LatentItems,
    batch_size: int,
    pool: ThreadPoolExecutor,
    workers: int,
    failed: Callable[[int, str], object],
    *,
    as_floats: bool = False,
) -> Iterator[DecodedBatch]:
    """Batches of consecutive `items` that share a bucket; `failed` gets those that cannot be read, and why.

    `as_floats` converts on the threads, for encoders on the CPU; other devices get uint8, a quarter of the bytes.
    """
    require_filter(wanted.encoding.interpolation)
    sizes = wanted.bucket_sizes.astype(np.int64).prod(axis=1) * (12 if as_floats else 3)
    sizes += 4 * np.asarray(wanted.original_sizes).astype(np.int64).prod(axis=1)  # as files are decoded

    def note(item: int, error: Exception) -> bool:
        failed(item, why_not_decoded(error))
        return False

    reader = Reader[int, Decoded](
        read=lambda i: decode(wanted, i, as_floats=as_floats),
        shape=lambda i: as_pair(wanted.bucket_sizes[i]),
        most=lambda _: batch_size,
        nbytes=lambda i: int(sizes[i]),
        failed=note,
        further=2 * workers,
    )
    for batch, reads in reader.batches(items, pool):
        yield joined_batch(batch, reads)


def why_not_decoded(error: Exception) -> str:
    """For the report; the error is raised where an image is not at fault itself."""
    if may_pass(error) or not isinstance(error, KohyaBucketError):
        raise error
    return str(error)


def joined_batch(items: list[int], reads: Sequence[Decoded]) -> DecodedBatch:
    """One batch of what was decoded of items of one bucket."""
    return DecodedBatch(items, np.stack([pixels for pixels, _ in reads]), [mask for _, mask in reads])


def decode(wanted: LatentItems, i: int, *, as_floats: bool) -> Decoded:
    """The pixels of item `i` as they are encoded, and its mask.

    Raises:
        KohyaBucketError: they cannot be read.
    """
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
    if not as_floats:
        return pixels[:, :, :3], mask
    floats = np.empty((3, bucket[1], bucket[0]), np.float32)
    to_floats(pixels, floats)
    return floats, mask


@dataclass
class EncodedBatch:
    """An encoded batch: positions among the wanted items, float32 latents on the CPU, masks."""

    items: list[int]
    plain: torch.Tensor
    flipped: torch.Tensor | None
    masks: list[Mask]


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
        self.report, self.say, self._progress = report, say or (lambda _: None), progress

    def tell(self, text: str) -> None:
        self.report.notes.append(text)
        self.say(text)

    def fail(self, path: str, reason: str) -> None:
        why = reason.removeprefix(f"{path}: ")
        self.report.failed.append((path, why))
        self.tell(f"{path}: {why}")

    def show(self, to_do: int) -> None:
        if self._progress is not None:
            self._progress(self.report.encoded + len(self.report.failed), to_do)


_MOST_IN_ENCODER = 3  # batches that are encoded or kept, whose pixels are held


def encode_missing(
    wanted: LatentItems,
    encode: BatchEncoder,
    sink: Sink,
    reporter: Reporter,
    batch_size: int,
    workers: int,
    seed: int,
    processes: int = 1,
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
    keeper = Keeper(wanted, encode, sink.write, reporter, to_do)
    caching = Caching(
        "image", to_do, report.current, keep=keeper.keep, flush=sink.flush, behind=_MOST_IN_ENCODER,
        processes=processes, say=reporter.say,
    )  # fmt: skip
    try:
        with caching.running(), threads(workers, "decode") as pool:
            items = order[missing[order]].tolist()
            batches = decode_ahead(
                items, wanted, batch_size, pool, workers, keeper.fail, as_floats=encode.on_processor
            )  # fmt: skip
            started = time.monotonic()
            encode_batches(wanted, encode, batches, caching, seed)
        report.device_idle = time.monotonic() - started - encode.busy
    finally:
        sink.close()


@dataclass
class Keeper:
    """What becomes of batches that were given to an encoder."""

    wanted: LatentItems
    encode: BatchEncoder
    write: Callable[[EncodedBatch], object]
    reporter: Reporter
    to_do: int

    def keep(self, begun: tuple[DecodedBatch, Running]) -> None:
        """Wait for a batch, and write what is good of it."""
        batch, running = begun
        done = self.encode.finish(running)
        for i, bad in zip(batch.items, done.bad, strict=True):
            if bad is not None:
                self.fail(i, bad)
        if good := [k for k, bad in enumerate(done.bad) if bad is None]:
            flipped = None if done.flipped is None else done.flipped[good]
            items, masks = [batch.items[k] for k in good], [batch.masks[k] for k in good]
            self.write(EncodedBatch(items, done.plain[good], flipped, masks))
            self.reporter.report.encoded += len(good)
        self.reporter.show(self.to_do)

    def fail(self, item: int, why: str) -> None:
        self.reporter.fail(self.wanted.paths[item], why)
        self.reporter.show(self.to_do)


def encode_batches(
    wanted: LatentItems, encode: BatchEncoder, batches: Iterator[DecodedBatch], caching: Caching, seed: int
) -> None:
    """Give decoded batches to an encoder; a GPU has begun the next one while what it made of the last is kept."""
    import torch

    for batch in caching.ahead(batches):
        names = [wanted.sources[i] for i in batch.items]
        seeds = [noise_seed(seed, name, wanted.collection) for name in names]
        running = encode.begin(torch.from_numpy(batch.pixels), seeds, names)
        width, height = as_pair(wanted.bucket_sizes[batch.items[0]])
        caching.put((batch, running), len(names), len(names) * width * height)
