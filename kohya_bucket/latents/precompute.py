"""Encode a dataset once: on every GPU of every node, whatever dies, and only what is missing or stale."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.types import Placement
from kohya_bucket.errors import KohyaBucketError, as_flag
from kohya_bucket.latents.claims import WorkBoard
from kohya_bucket.latents.decode_ahead import Batch, decode_ahead, give_way
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.encoder import PosteriorEncoder, VAEEncoder, check_encoder, encoder_hash, encoder_space
from kohya_bucket.latents.encoding import BatchEncoder, noise_seed
from kohya_bucket.latents.layout import Layout, is_text
from kohya_bucket.latents.npz import ARCHITECTURES, Architecture
from kohya_bucket.latents.report import PrecomputeReport
from kohya_bucket.latents.sinks import Background, Finished, NpzSink, ShardSink
from kohya_bucket.latents.store import LatentStore
from kohya_bucket.latents.wanted import Recipe, Wanted
from kohya_bucket.latents.writer import write_manifest

if TYPE_CHECKING:
    from kohya_bucket.latents.encoding import Encoded

__all__ = ["PrecomputeReport", "common_root", "encode_wanted", "precompute_latents"]

_CHUNK = 256


def precompute_latents(
    dataset: Any,
    encoder: VAEEncoder,
    output_dir: str | os.PathLike[str] | None,
    *,
    batch_size: int = 8,
    dtype: Any = "float32",
    flip: bool = False,
    mask: bool = False,
    posterior: bool = False,
    format: str = "shards",
    architecture: str = "",
    interpolation: str = "auto",
    collection: str = "",
    images_root: str | os.PathLike[str] | None = None,
    content_hash: bool = False,
    progress_callback: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> PrecomputeReport:
    """Encode every image of `dataset` that is not in `output_dir` as it should be.

    Started in several processes with the same arguments (torchrun, accelerate, by hand, on several nodes with a
    shared folder), they divide the work among them. Nothing is held open between them, so no process group is
    needed and none times out; if one dies, the others do its part.

    Args:
        dataset: a `BucketedDataset`, or anything with `paths`, `sizes`, `placement` and, if it has any, `captions`.
        encoder: any `VAEEncoder`. With a `posterior` method, raw latents are stored; without, scaled ones.
        output_dir: the store's folder; for npz None puts files beside the images.
        dtype: storage type: "float32", "float16" or "bfloat16", or torch's; npz are always float32.
        flip, mask: also store mirrored images, the alpha channel.
        posterior: store mean and standard deviation, which are sampled at every read.
        format: "shards" or "npz" (sd-scripts' own files).
        architecture: sd-scripts' name of the model family; needed for npz, if the encoder does not know it.
        interpolation: filter of the resize, see `images.pixels.INTERPOLATIONS`.
        collection: part of the store, to keep latents of several models or resolutions apart.
        images_root: folder the sources' names start from; None: the common one, or the one of the store.
        content_hash: store a hash of each file, so that a copied or touched image counts as unchanged.
        progress_callback: called with (done, to do) in items.
        settings: see `encode_wanted`.

    Raises:
        KohyaBucketError: settings that do not fit together, or a folder that cannot be written.
    """
    check_encoder(encoder)
    paths, placement, captions = _of(dataset)
    root = _images_root(paths, output_dir, images_root)
    recipe = Recipe(
        encoder_hash(encoder), dtype_name(dtype), "posterior" if as_flag("posterior", posterior) else "latents",
        as_flag("flip", flip), as_flag("mask", mask), interpolation, collection,
    )  # fmt: skip
    wanted = Wanted.from_placement(
        paths, dataset.sizes, placement, recipe, root, captions=captions,
        content_hash=as_flag("content_hash", content_hash),
    )  # fmt: skip
    return encode_wanted(
        wanted, encoder, output_dir, root, batch_size=batch_size, format=format, architecture=architecture,
        progress_callback=progress_callback, **settings,
    )  # fmt: skip


def encode_wanted(
    wanted: Wanted,
    encoder: VAEEncoder,
    output_dir: str | os.PathLike[str] | None,
    images_root: Path,
    *,
    batch_size: int = 8,
    format: str = "shards",
    architecture: str = "",
    progress_callback: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
    workers: int | None = None,
    seed: int = 0,
    shard_bytes: int = 256 << 20,
    flush_seconds: float | None = 60.0,
    stale_after: float = 30.0,
    sync: bool = True,
    npz_paths: Sequence[Path] | None = None,
) -> PrecomputeReport:
    """`precompute_latents` for items that are known already.

    Args:
        say: called with a line of text for whatever a user should know at once.
        workers: threads that decode images; None: one per processor.
        seed: of the noise with which latents are sampled.
        shard_bytes, flush_seconds: see `StoreWriter`.
        stale_after: seconds without a sign of life after which another process counts as dead.
        sync: for npz, wait until each file is safe on disk.
        npz_paths: the file of each item, where these are part of a run, see `paths_of_run`.
    """
    if workers is not None and workers < 1:
        raise KohyaBucketError(f"workers is {workers}, but must be 1 or more; leave it out for one per processor")
    _check(wanted.recipe, encoder, output_dir, format, architecture or str(getattr(encoder, "architecture", "")))
    if format == "npz":  # whatever the VAE computes in, these files hold float32
        wanted = replace(wanted, recipe=replace(wanted.recipe, dtype="float32"))
    nameless: list[str] = []
    if format == "shards":
        wanted, nameless = _distinct(wanted)
    report = PrecomputeReport(
        None if output_dir is None else Path(output_dir), len(wanted) + len(nameless),
        without_bucket=wanted.without_bucket,
    )  # fmt: skip

    def tell(text: str) -> None:
        report.notes.append(text)
        if say is not None:
            say(text)

    run = _Run(wanted, encoder, batch_size, report, tell, progress_callback, workers or os.cpu_count() or 1, seed)
    space = encoder_space(encoder)
    sink: ShardSink | NpzSink
    if format == "npz":
        arch = ARCHITECTURES[architecture or str(getattr(encoder, "architecture", ""))]
        sink = NpzSink(report.output, wanted, space, arch, images_root, run.safe, paths=npz_paths, sync=sync)
        for i in sink.shared:
            tell(f"{wanted.paths[i]}: another image of its folder has the same name and size, and sd-scripts would "
                 f"let both use one file; its own is {sink.paths[i].name}, which sd-scripts finds with the "
                 "kohya_bucket adapter only: rename the image to do without")  # fmt: skip
        work = (report.output or images_root) / ".kohya_bucket_work"
    else:
        assert output_dir is not None  # checked above
        sink = ShardSink(
            Path(output_dir), wanted, space, images_root, run.safe, shard_bytes=shard_bytes, flush_seconds=flush_seconds
        )
        work = Layout(output_dir).work
    started = time.monotonic()
    if len(wanted):
        with WorkBoard(work, stale_after=stale_after) as board:
            run.through(sink, board)
    report.seconds = time.monotonic() - started
    for path in nameless:
        report.failed.append((path, "its name is no UTF-8, which a store cannot hold: rename it, or use --format npz"))
        tell(f"{path!a}: {report.failed[-1][1]}")
    if isinstance(sink, ShardSink):
        _finish_store(sink, wanted)
    sizes, counts = np.unique(wanted.bucket_sizes, axis=0, return_counts=True)
    report.buckets = [((int(w), int(h)), int(n)) for (w, h), n in zip(sizes, counts, strict=True)]
    return report


class _Run:
    """The state of one process' run: what is to do, what is done, and who waits for what."""

    def __init__(
        self, wanted: Wanted, encoder: VAEEncoder, batch_size: int, report: PrecomputeReport,
        tell: Callable[[str], None], progress: Callable[[int, int], None] | None, workers: int, seed: int,
    ) -> None:  # fmt: skip
        self.wanted = wanted
        self.report = report
        self._batch_size = batch_size
        self._encode = BatchEncoder(encoder, wanted.recipe.kind, wanted.recipe.flip, tell)
        self._tell = tell
        self._progress = progress
        self._workers = workers
        self._seed = seed
        self._lock = threading.Lock()
        self._chunk_of: dict[int, str] = {}
        self._open: dict[str, int] = {}
        self._board: WorkBoard | None = None
        self._to_do = 0
        self._busy = 0.0
        self._sizes: dict[str, int] = {}

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

    def through(self, sink: ShardSink | NpzSink, board: WorkBoard) -> None:
        """Do everything that is to do, together with whoever else is at it."""
        self._board = board
        wanted = self.wanted
        to_do = self._missing(sink)
        self.report.current = len(wanted) - int(to_do.sum())
        chunks = {name: items for name, items in _chunks(wanted, self._batch_size) if to_do[items].any()}
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

    def _missing(self, sink: ShardSink | NpzSink) -> npt.NDArray[np.bool_]:
        to_do = np.zeros(len(self.wanted), dtype=bool)
        reasons: dict[str, int] = {}
        if isinstance(sink, ShardSink):
            comparison = sink.compare()
            to_do, reasons = comparison.to_do, comparison.counts()
        else:
            for i in range(len(self.wanted)):
                for reason in sink.reasons(i):
                    to_do[i] = True
                    reasons[reason] = reasons.get(reason, 0) + 1
        self.report.reasons = reasons
        return to_do

    def _work(
        self, turn: Iterator[str], chunks: dict[str, npt.NDArray[np.int64]], sink: ShardSink | NpzSink,
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
        started, busy = time.monotonic(), self._busy
        for batch in decode_ahead(items(), self.wanted, self._batch_size, pool, ahead, as_floats=floats):
            self._fail(batch.failed)
            if batch.items:
                self._one(batch, writer)
            self._show()
        self.report.device_idle += time.monotonic() - started - (self._busy - busy)

    def _one(self, batch: Batch, writer: Background) -> None:
        import torch

        names = [self.wanted.sources[i] for i in batch.items]
        seeds = [noise_seed(self._seed, name, self.wanted.recipe.collection) for name in names]
        began = time.monotonic()
        done: Encoded = self._encode(torch.from_numpy(batch.pixels), seeds, names)
        self._busy += time.monotonic() - began
        self._fail([(i, bad) for i, bad in zip(batch.items, done.bad, strict=True) if bad is not None])
        good = [k for k, bad in enumerate(done.bad) if bad is None]
        if good:
            flipped = None if done.flipped is None else done.flipped[good]
            items, masks = [batch.items[k] for k in good], [batch.masks[k] for k in good]
            writer.put(Finished(items, done.plain[good], flipped, masks))
            self.report.encoded += len(good)

    def _fail(self, failed: Sequence[tuple[int, str]]) -> None:
        for i, reason in failed:
            path = self.wanted.paths[i]
            self.report.failed.append((path, reason.removeprefix(f"{path}: ")))
            self._tell(f"{path}: {reason.removeprefix(f'{path}: ')}")
        self.safe([i for i, _ in failed])

    def _show(self) -> None:
        if self._progress is None or self._board is None:
            return
        mine = self.report.encoded + len(self.report.failed)
        others = sum(
            self._sizes[chunk] for chunk in self._board.finished_pieces() if chunk in self._sizes.keys() - self._open
        )
        self._progress(min(mine + others, self._to_do), self._to_do)


def _distinct(wanted: Wanted) -> tuple[Wanted, list[str]]:
    """One item per row of a store, the last where an image comes again; and the images whose names no row can hold."""
    last = {source: i for i, source in enumerate(wanted.sources)}
    keep = [i for i in last.values() if is_text(wanted.sources[i])]
    nameless = [wanted.paths[i] for i in last.values() if not is_text(wanted.sources[i])]
    if len(keep) < len(wanted):
        wanted = replace(wanted.subset(keep), without_bucket=wanted.without_bucket)
    return wanted, nameless


def _chunks(wanted: Wanted, batch_size: int) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Pieces of work: items of one bucket, named by what is in them, so that every process names them alike."""
    n = len(wanted)
    order = np.lexsort((np.arange(n), wanted.bucket_sizes[:, 1], wanted.bucket_sizes[:, 0]))
    size = max(batch_size, min(_CHUNK, -(-n // 64)) // batch_size * batch_size)
    sizes = wanted.bucket_sizes[order]
    edges = np.flatnonzero(np.append(True, (sizes[1:] != sizes[:-1]).any(axis=1)))
    for start, stop in zip(edges, [*edges[1:], n], strict=True):
        for at in range(start, stop, size):
            items = order[at : min(at + size, stop)].astype(np.int64)
            text = "\n".join([repr(wanted.recipe), str(tuple(sizes[at])), *(wanted.sources[i] for i in items)])
            yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest(), items


def _finish_store(sink: ShardSink, wanted: Wanted) -> None:
    """Index the store; captions that changed since, and hashes that were not asked for before, need no encoding."""
    store = sink.store
    store.refresh()
    at = store.find(wanted.sources, wanted.recipe.collection)
    here = np.flatnonzero(at >= 0)
    rows = at[here]
    captions = _changed_texts(store, "caption", rows, [wanted.captions[i] for i in here])
    hashes: dict[int, str | None] = {}
    if wanted.source_hashes is not None:
        same = store.column("source_bytes")[rows] == wanted.source_bytes[here]
        same &= store.column("source_mtime_ns")[rows] == wanted.source_mtime_ns[here]
        hashes = _changed_texts(store, "source_hash", rows[same], [wanted.source_hashes[i] for i in here[same]])
    table = store.with_texts(caption=captions, source_hash=hashes) if captions or hashes else None
    write_manifest(store, table)


def _changed_texts(
    store: LatentStore, name: str, rows: npt.NDArray[np.int64], texts: Sequence[str | None]
) -> dict[int, str | None]:
    stored = store.table[name].take(rows).to_pylist() if len(rows) else []
    return {int(row): new for row, new, old in zip(rows, texts, stored, strict=True) if new != old}


def _of(dataset: Any) -> tuple[list[str], Placement, list[str | None] | None]:
    """Paths, placement and captions of a data set."""
    source = getattr(dataset, "source", dataset)
    paths = getattr(source, "paths", None)
    if paths is None:
        raise KohyaBucketError(
            f"latents are kept by image file, and {type(source).__name__} has none: save the images as files first"
        )
    if getattr(source, "obey_exif", getattr(source, "_obey_exif", False)):
        raise KohyaBucketError(
            "latents are encoded from images as they are stored: make the data set without obey_exif"
        )
    placement = getattr(dataset, "placement", None)
    if placement is None:
        placement = dataset.strategy.place(dataset.sizes)
    captions = getattr(dataset, "captions", None)
    if captions is None and hasattr(source, "caption"):
        captions = [source.caption(i) or None for i in range(len(paths))]
    return [os.fspath(path) for path in paths], placement, captions


def _images_root(
    paths: Sequence[str], output_dir: str | os.PathLike[str] | None, given: str | os.PathLike[str] | None
) -> Path:
    return Path(os.path.abspath(given)) if given is not None else common_root(paths, output_dir)


def common_root(paths: Sequence[str], output_dir: str | os.PathLike[str] | None) -> Path:
    """Folder that sources are named from: the one the store remembers, or the deepest that holds all images."""
    if output_dir is not None and Layout(output_dir).settings.is_file():
        return Layout(output_dir).images_root()
    if not paths:
        return Path.cwd()
    try:
        common = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    except ValueError:  # several drives
        common = os.path.dirname(os.path.abspath(paths[0]))
    return Path(common)


def _check(
    recipe: Recipe, encoder: VAEEncoder, output_dir: str | os.PathLike[str] | None, format: str, architecture: str
) -> None:
    if format not in ("shards", "npz"):
        raise KohyaBucketError(f"format {format!r}: use 'shards' or 'npz'")
    if format == "shards" and output_dir is None:
        raise KohyaBucketError("shards need an output folder: give --output")
    if recipe.kind == "posterior" and not isinstance(encoder, PosteriorEncoder):
        raise KohyaBucketError(
            f"{type(encoder).__name__} has no posterior method, so there is no distribution to store: "
            "leave out --posterior"
        )
    if format == "npz":
        if recipe.kind == "posterior":
            raise KohyaBucketError("sd-scripts' npz hold latents, no distribution: use --format shards for --posterior")
        if architecture not in ARCHITECTURES:
            raise KohyaBucketError(
                f"npz are named by model family, and {architecture or 'none'!r} is none: "
                f"add --arch, one of {', '.join(ARCHITECTURES)}"
            )
        check_family(encoder, ARCHITECTURES[architecture])


def check_family(encoder: VAEEncoder, arch: Architecture) -> None:
    """Refuse a VAE whose latents have another shape than the model family's."""
    if (encoder.latent_channels, encoder.downsample_factor) != (arch.channels, arch.stride):
        raise KohyaBucketError(
            f"the VAE has {encoder.latent_channels} channels and divides by {encoder.downsample_factor}; "
            f"{arch.name} has {arch.channels} and divides by {arch.stride}"
        )
