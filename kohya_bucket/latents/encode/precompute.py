"""Encode a dataset, and the captions of a store, on every GPU: only what is missing or stale."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import as_pair, size_keys, sizes_of_keys
from kohya_bucket.checks import as_flag, known_keyword, number_of_launch, refuse_other, whole_number
from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.encode.pipeline import Caching
from kohya_bucket.latents.encode.worker import (
    PrecomputeReport,
    Reporter,
    Sink,
    StoreSink,
    encode_missing,
    share_of,
)
from kohya_bucket.latents.items import TEXT_FOLDER, Caption, CaptionItems, EncodeOptions, Encoding, LatentItems
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.exact_arrays import Array
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import common_root, is_text
from kohya_bucket.latents.store.storage import StorePath
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.vae.batches import MOST_TOGETHER
from kohya_bucket.latents.vae.encoder import (
    BatchEncoder,
    PosteriorEncoder,
    VAEEncoder,
    check_encoder,
    encoder_hash,
    encoder_space,
)

Refused = list[tuple[str, str]]  # path or address, and why

_NAMELESS = "its name is not UTF-8, and a store cannot hold such names: rename it, or use --format npz"


class LatentOutput(Protocol):
    """What `precompute_latents` writes to: `StoreOutput`, or a trainer's own files.

    Attributes:
        folder: of the output; None: beside the images.
    """

    @property
    def folder(self) -> str | os.PathLike[str] | None: ...

    def accept(self, wanted: LatentItems, encoder: VAEEncoder, images_root: Path) -> tuple[LatentItems, Refused]:
        """The items as they will be written, and those that cannot be.

        Raises:
            KohyaBucketError: none of them can be written.
        """

    def sink(self, share: LatentItems, space: LatentSpace, images_root: Path) -> Sink:
        """The sink for a process' share of the items, whose numbers mean `space`."""


@dataclass(frozen=True)
class StoreOutput:
    """A store, by its folder or address."""

    folder: str | os.PathLike[str]

    def accept(self, wanted: LatentItems, encoder: VAEEncoder, images_root: Path) -> tuple[LatentItems, Refused]:
        """See `LatentOutput`."""
        check_kind(wanted.encoding.kind, isinstance(encoder, PosteriorEncoder), type(encoder).__name__)
        return distinct(wanted)

    def sink(self, share: LatentItems, space: LatentSpace, images_root: Path) -> StoreSink:
        """See `LatentOutput`."""
        return StoreSink(self.folder, share, space, images_root)


def encode_items(
    wanted: LatentItems,
    encoder: VAEEncoder,
    output: LatentOutput,
    images_root: Path,
    *,
    batch_size: int | None = None,
    progress_callback: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
    workers: int | None = None,
    seed: int = 0,
    rank: int = 0,
    processes: int = 1,
) -> PrecomputeReport:
    """`precompute_latents` for given items.

    Args:
        say: called with each line that the user should see at once.
        workers: threads that decode images; None: one per processor.
        seed: of the noise with which latents are sampled.
        rank, processes: see `precompute_latents`.
    """
    check_numbers(batch_size, rank, processes, workers)
    wanted, refused = output.accept(wanted, encoder, images_root)
    report = PrecomputeReport(output.folder, len(wanted) + len(refused), without_bucket=wanted.without_bucket)
    read_together = batch_size or MOST_TOGETHER  # equal in all processes: it decides which items are whose
    of_rank = share_of(wanted, read_together, rank, processes).tolist()
    share = wanted if len(of_rank) == len(wanted) else wanted.subset(of_rank)
    report.elsewhere = len(wanted) - len(share)
    reporter = Reporter(report, say, progress_callback)
    encode = BatchEncoder(encoder, wanted.encoding.kind, wanted.encoding.flip, reporter.tell, batch_size)
    sink = output.sink(share, encoder_space(encoder), images_root)
    for note in sink.notes:
        reporter.tell(note)
    started = time.monotonic()
    if len(share):
        encode_missing(share, encode, sink, reporter, read_together, workers or os.cpu_count() or 1, seed, processes)
    report.seconds = time.monotonic() - started
    finish(reporter, wanted, refused if rank == 0 else [], sink)
    return report


def check_numbers(batch_size: int | None, rank: int = 0, processes: int = 1, workers: int | None = None) -> None:
    """Refuse numbers, or a process, with which nothing, or too little, would be encoded."""
    for name, number in (("batch_size", batch_size), ("workers", workers)):
        if number is not None:
            refuse_other(name, number, whole_number(1), KohyaBucketError)
    if not 0 <= rank < processes:
        raise KohyaBucketError(f"rank is {rank} of {processes} processes, but they count from 0")


def launched() -> tuple[int, int]:
    """Which process of a launch by torchrun or accelerate this is, and how many there are. Raises as
    `number_of_launch`."""
    world = number_of_launch("WORLD_SIZE", 1, range(1, 1 << 31))
    return number_of_launch("RANK", 0, range(world)), world


def end_launch(output: StorePath | None) -> None:
    """Wait for the other processes of a launch, then let the first one index the store in `output`, if any.

    torchrun ends all processes when one exits with an error, such as one for a broken image: so none exits before all
    are done. They meet in the launcher's key-value store, which needs no process group and has no time limit.
    """
    rank, processes = launched()
    if processes > 1 and "MASTER_ADDR" in os.environ:
        import torch.distributed as group

        keys, _, _ = next(group.rendezvous("env://", timeout=timedelta(days=365)))
        for name, others in (("done", processes), ("gone", processes if rank == 0 else 0)):
            keys.add(f"kohya_bucket/{name}", 1)
            while keys.add(f"kohya_bucket/{name}", 0) < others:  # the first may serve the keys, so it exits last
                time.sleep(0.1)
    if processes > 1 and rank == 0 and output is not None:
        write_manifest(LatentStore(output))


def finish(reporter: Reporter, wanted: LatentItems, refused: Refused, sink: Sink) -> None:
    """The end of every engine: report what was refused, index the output, and count."""
    report = reporter.report
    for path, why in refused:
        report.failed.append((path, why))
        reporter.tell(f"{path!a}: {why}")
    sink.finish(wanted)
    keys, counts = np.unique(size_keys(wanted.bucket_sizes), return_counts=True)
    report.buckets = [(as_pair(size), int(n)) for size, n in zip(sizes_of_keys(keys), counts, strict=True)]


def distinct(wanted: LatentItems) -> tuple[LatentItems, Refused]:
    """The items without repetitions, of which the last counts; and those whose names a store cannot hold."""
    last = {source: i for i, source in enumerate(wanted.sources)}
    keep = [i for i in last.values() if is_text(wanted.sources[i])]
    nameless = [(wanted.paths[i], _NAMELESS) for i in last.values() if not is_text(wanted.sources[i])]
    if len(keep) < len(wanted):
        wanted = replace(wanted.subset(keep), without_bucket=wanted.without_bucket)
    return wanted, nameless


def check_kind(kind: str, posterior: bool, encoder: str) -> None:
    """Refuse to store a distribution if the encoder has none; `encoder` is the name of its class."""
    if kind == "posterior" and not posterior:
        raise KohyaBucketError(
            f"{encoder} has no posterior method, so there is no distribution to store: leave out --posterior"
        )


def precompute_latents(
    dataset: Any,
    encoder: VAEEncoder,
    output: str | os.PathLike[str] | LatentOutput,
    *,
    batch_size: int | None = None,
    dtype: Any = "float32",
    flip: bool = False,
    mask: bool = False,
    posterior: bool = False,
    interpolation: str = "auto",
    collection: str = "",
    images_root: str | os.PathLike[str] | None = None,
    content_hash: bool = False,
    progress_callback: Callable[[int, int], None] | None = None,
    **options: Any,
) -> PrecomputeReport:
    """Encode every image of `dataset` that is missing from `output`, or stale there.

    Each of several processes encodes its own share; they need not be connected, and none waits for another. If one ends
    early, starting again encodes what it left.

    Args:
        dataset: a `BucketedDataset`, or anything with `paths`, `sizes`, `placement` and, if it has any, `captions`.
        encoder: any `VAEEncoder`. With a `posterior` method, raw latents are stored; without, scaled ones.
        output: the store's folder or address, or another `LatentOutput`, such as the files of a trainer.
        batch_size: images in one call of the encoder; None: 8, or as many as fit into memory.
        dtype: storage type: "float32", "float16" or "bfloat16", or torch's.
        flip: also store mirrored images.
        mask: also store the alpha channel.
        posterior: store mean and standard deviation, which are sampled at every read.
        interpolation: filter of the resize, see `images.resize.INTERPOLATIONS`.
        collection: part of the store, to keep latents of several models or resolutions apart.
        images_root: folder that the sources' names start from; None: the store's, or the deepest that holds all images.
        content_hash: store a hash of each file, so that a copied or touched image counts as unchanged.
        progress_callback: called with (done, to do) in items of this process' share.
        options: see `encode_items`. `rank` and `processes`: this is process `rank` of so many, all with the same other
            arguments. Wait for the others before the same program reads the store.

    Raises:
        KohyaBucketError: options that do not fit together, or a folder that cannot be written.

    Examples:
        >>> dataset = BucketedDataset.from_folder("photos", KohyaBuckets.for_arch("sd"))
        >>> report = precompute_latents(dataset, vae, "latents")  # vae: a VAEEncoder
        >>> report.encoded, report.failed
        (6, [])
        >>> precompute_latents(dataset, vae, "latents").encoded  # what is there stays
        0
    """
    arguments, further = (inspect.signature(function).parameters for function in (precompute_latents, encode_items))
    keywords = [name for name, parameter in further.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    known_keyword("precompute_latents()", options, ({*arguments} - {"options"}).union(keywords))
    check_encoder(encoder)
    if isinstance(output, (str, os.PathLike)):
        output = StoreOutput(output)
    paths, placement, captions = _images_of(dataset)
    root = common_root(paths, output.folder) if images_root is None else Path(os.path.abspath(images_root))
    encoding = EncodeOptions(
        vae=encoder_hash(encoder),
        dtype=dtype_name(dtype),
        kind="posterior" if as_flag("posterior", posterior) else "latents",
        flip=as_flag("flip", flip),
        mask=as_flag("mask", mask),
        interpolation=interpolation,
        collection=collection,
    )
    content_hash = as_flag("content_hash", content_hash)
    wanted = LatentItems.from_placement(
        paths, dataset.sizes, placement, encoding, root, captions=captions, content_hash=content_hash
    )
    return encode_items(
        wanted, encoder, output, root, batch_size=batch_size, progress_callback=progress_callback, **options
    )


def _images_of(dataset: Any) -> tuple[list[str], Placement, list[str | None] | None]:
    source = getattr(dataset, "source", dataset)
    paths = getattr(source, "paths", None)
    if paths is None:
        raise KohyaBucketError(
            f"latents are stored by image file, and {type(source).__name__} has none: save the images as files first"
        )
    if getattr(source, "obey_exif", getattr(source, "_obey_exif", False)):
        raise KohyaBucketError("latents are encoded from images as they are stored: make the dataset without obey_exif")
    placement = getattr(dataset, "placement", None)
    if placement is None:
        placement = focused(dataset.rule.place(dataset.sizes), getattr(dataset, "focus", None))
    captions = getattr(dataset, "captions", None)
    if captions is None and hasattr(source, "caption"):
        captions = [source.caption(i) or None for i in range(len(paths))]
    if captions is not None and len(captions) != len(paths):
        raise KohyaBucketError(f"the dataset has {len(captions)} captions for {len(paths)} images: give one for each")
    return [os.fspath(path) for path in paths], placement, captions


class TextEncoder(Protocol):
    """What `precompute_text` encodes with.

    Attributes:
        weights: hash of its weights, "" if unknown; where it differs, captions are encoded again.
        tokens: how captions become tokens, in one line; where it differs, captions are encoded again.
    """

    weights: str
    tokens: str

    def encode(self, captions: Sequence[str]) -> list[Mapping[str, Array]]:
        """The outputs of each caption by name; bfloat16 as float32, which is stored as bfloat16 again."""
        ...


def precompute_text(
    store: str | os.PathLike[str],
    encoder: TextEncoder,
    *,
    name: str = "text",
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
    processes: int = 1,
) -> PrecomputeReport:
    """Encode each distinct caption of the latents in `store`, for `BucketedLatentDataset(store, text_outputs=name)`.

    The empty caption is encoded too, for the dataset's `caption_dropout`. Each of several processes encodes its own
    share. If the run is interrupted, what is encoded stays.

    Args:
        store: folder of a store of latents; the outputs go to its folder `text`.
        name: of these outputs, to keep those of several encoders apart.
        batch_size: captions in one call of the encoder.
        progress: called with (done, to do) in captions.
        rank, processes: this is process `rank` of so many.

    Raises:
        KohyaBucketError: a batch size below 1, or a rank that is none of the processes.
        LatentStoreError: there is no store, its folder cannot be written, or an output cannot be stored.
    """
    check_numbers(batch_size, rank, processes)
    latents = LatentStore(store)
    root = latents.layout.root
    if not len(latents.table):
        raise LatentStoreError(f"{root} holds no latents, so no captions: run `kohya-bucket precompute`")
    texts = sorted({"", *(text or "" for text in latents.table["caption"].unique().to_pylist())})
    all_items = CaptionItems(list(map(Caption, texts)), Encoding(encoder.weights, encoder.tokens), name)
    items = replace(all_items, captions=all_items.captions[rank::processes])
    sink = StoreSink(root / TEXT_FOLDER, items)
    missing, reasons = sink.missing()
    to_do = sorted(np.flatnonzero(missing).tolist(), key=lambda i: len(items.captions[i].text))  # alike together
    current, elsewhere = len(items) - len(to_do), len(texts) - len(items)
    report = PrecomputeReport(root / TEXT_FOLDER, len(texts), current, reasons=reasons, elsewhere=elsewhere)
    caching = Caching(
        "caption", len(to_do), current, keep=lambda made: items.add(sink.writer, *made), flush=sink.flush,
        processes=processes,
    )  # fmt: skip
    try:
        with caching.running():
            for start in range(0, len(to_do), batch_size):
                batch = to_do[start : start + batch_size]
                caching.put((batch, encoder.encode([str(items.captions[i].text) for i in batch])), len(batch))
                report.encoded += len(batch)
                if progress is not None:
                    progress(report.encoded, len(to_do))
    finally:
        sink.finish(all_items)
    return report
