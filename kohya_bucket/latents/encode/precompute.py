"""Encode a dataset once, and the captions of a store: on every GPU, and only what is missing or stale."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.placing import place
from kohya_bucket.buckets.sizes import as_pair, size_keys, sizes_of_keys
from kohya_bucket.checks import as_flag, number_of_launch
from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.encode.worker import (
    NpzSink,
    PrecomputeReport,
    Reporter,
    ShardSink,
    Sink,
    encode_missing,
    share_of,
)
from kohya_bucket.latents.items import TEXT_FOLDER, Caption, CaptionItems, EncodeOptions, Encoding, LatentItems
from kohya_bucket.latents.npz.names import paths_of_run
from kohya_bucket.latents.store.exact_arrays import Array
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import common_root, is_text
from kohya_bucket.latents.store.storage import RemotePath, StorePath, as_given
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.vae.encoder import (
    BatchEncoder,
    PosteriorEncoder,
    VAEEncoder,
    check_encoder,
    encoder_hash,
    encoder_space,
)

_NAMELESS = "its name is not UTF-8, and a store cannot hold such names: rename it, or use --format npz"


def encode_items(
    wanted: LatentItems, encoder: VAEEncoder, output_dir: str | os.PathLike[str] | None, images_root: Path, *,
    batch_size: int = 8, format: str = "shards", architecture: str = "",
    progress_callback: Callable[[int, int], None] | None = None, say: Callable[[str], None] | None = None,
    workers: int | None = None, seed: int = 0, shard_bytes: int = 256 << 20, flush_seconds: float | None = 60.0,
    sync: bool = True, npz_paths: Sequence[Path] | None = None, sd_scripts: str = "", rank: int = 0,
    processes: int = 1,
) -> PrecomputeReport:  # fmt: skip
    """`precompute_latents` for items that are known already.

    Args:
        say: called with a line of text for whatever a user should know at once.
        workers: threads that decode images; None: one per processor.
        seed: of the noise with which latents are sampled.
        shard_bytes, flush_seconds: see `StoreWriter`.
        sync: for npz, wait until each file is safe on disk.
        npz_paths: the file of each item, where these are part of a run, see `paths_of_run`.
        sd_scripts: the version that will read the npz, e.g. "0.10.1"; "" for the newest.
        rank, processes: see `precompute_latents`.
    """
    if workers is not None and workers < 1:
        raise KohyaBucketError(f"workers is {workers}, but must be 1 or more; leave it out for one per processor")
    if not 0 <= rank < processes:
        raise KohyaBucketError(f"rank is {rank} of {processes} processes, but they count from 0")
    architecture = architecture or str(getattr(encoder, "architecture", ""))
    check_target(wanted.encoding.kind, output_dir, format)
    check_kind(wanted.encoding.kind, isinstance(encoder, PosteriorEncoder), type(encoder).__name__)
    nameless: list[str] = []
    if format == "npz":  # whatever the VAE computes in, these files hold float32
        check_family(encoder, architecture)
        wanted = replace(wanted, encoding=replace(wanted.encoding, dtype="float32"))
    else:
        wanted, nameless = distinct(wanted)
    output = None if output_dir is None else as_given(output_dir)
    report = PrecomputeReport(output, len(wanted) + len(nameless), without_bucket=wanted.without_bucket)
    mine = share_of(wanted, batch_size, rank, processes).tolist()
    share = wanted if len(mine) == len(wanted) else wanted.subset(mine)
    report.elsewhere = len(wanted) - len(share)
    reporter = Reporter(report, say, progress_callback)
    encode = BatchEncoder(encoder, wanted.encoding.kind, wanted.encoding.flip, reporter.tell)
    space = encoder_space(encoder)
    sink: Sink
    if format == "npz" or output is None:
        arch = ARCHITECTURES[architecture].read_by(sd_scripts)
        assert not isinstance(output, RemotePath)  # which `_check` refuses
        paths = paths_of_run([wanted], arch, output, images_root)[0] if npz_paths is None else npz_paths
        sink = NpzSink([paths[i] for i in mine], share, space, arch, sync=sync)
    else:
        sink = ShardSink(output, share, space, images_root, shard_bytes=shard_bytes, flush_seconds=flush_seconds)
    for note in sink.notes:
        reporter.tell(note)
    started = time.monotonic()
    if len(share):
        encode_missing(share, encode, sink, reporter, batch_size, workers or os.cpu_count() or 1, seed)
    report.seconds = time.monotonic() - started
    finish(reporter, wanted, nameless if rank == 0 else [], sink)
    return report


def launched() -> tuple[int, int]:
    """Which process of a launch by torchrun or accelerate this is, and how many there are.

    Raises:
        KohyaBucketError: `RANK` or `WORLD_SIZE` in the environment is no such number.
    """
    world = number_of_launch("WORLD_SIZE", 1, range(1, 1 << 31))
    return number_of_launch("RANK", 0, range(world)), world


def end_launch(output: StorePath | None) -> None:
    """Wait for the other processes of a launch, and let the first index the store in `output`, if there is one.

    torchrun ends all processes when one ends with an error, such as one for a broken image: so none ends before all are
    done. They meet in the launcher's own store of keys, which needs no process group and has no time limit.
    """
    rank, processes = launched()
    if processes > 1 and "MASTER_ADDR" in os.environ:
        import torch.distributed as group

        keys, _, _ = next(group.rendezvous("env://", timeout=timedelta(days=365)))
        for name, others in (("done", processes), ("gone", processes if rank == 0 else 0)):
            keys.add(f"kohya_bucket/{name}", 1)
            while keys.add(f"kohya_bucket/{name}", 0) < others:  # the first may hold the keys, and goes last
                time.sleep(0.1)
    if processes > 1 and rank == 0 and output is not None:
        write_manifest(LatentStore(output))


def finish(reporter: Reporter, wanted: LatentItems, nameless: list[str], sink: Sink) -> None:
    """What every engine does at the end: name what no row can hold, index, and count."""
    report = reporter.report
    for path in nameless:
        report.failed.append((path, _NAMELESS))
        reporter.tell(f"{path!a}: {_NAMELESS}")
    for note in sink.finish(wanted):
        reporter.tell(note)
    keys, counts = np.unique(size_keys(wanted.bucket_sizes), return_counts=True)
    report.buckets = [(as_pair(size), int(n)) for size, n in zip(sizes_of_keys(keys), counts, strict=True)]


def distinct(wanted: LatentItems) -> tuple[LatentItems, list[str]]:
    """One item per row of a store, the last where an image comes again; and the images whose names no row can hold."""
    last = {source: i for i, source in enumerate(wanted.sources)}
    keep = [i for i in last.values() if is_text(wanted.sources[i])]
    nameless = [wanted.paths[i] for i in last.values() if not is_text(wanted.sources[i])]
    if len(keep) < len(wanted):
        wanted = replace(wanted.subset(keep), without_bucket=wanted.without_bucket)
    return wanted, nameless


def check_kind(kind: str, posterior: bool, encoder: str) -> None:
    """Refuse to store the distribution of an encoder that gives none; `encoder` is the name of its class."""
    if kind == "posterior" and not posterior:
        raise KohyaBucketError(
            f"{encoder} has no posterior method, so there is no distribution to store: leave out --posterior"
        )


def check_target(kind: str, output_dir: str | os.PathLike[str] | None, format: str) -> None:
    """Refuse what cannot be written, whatever the encoder: an unknown format, shards without a folder, npz in object
    storage, or a distribution in npz."""
    if format not in ("shards", "npz"):
        raise KohyaBucketError(f"format {format!r} does not exist: use 'shards' or 'npz'")
    if format == "shards" and output_dir is None:
        raise KohyaBucketError("shards need an output folder: add --output")
    if format == "npz" and is_url(os.fspath(output_dir or "")):
        raise KohyaBucketError(
            f"{output_dir}: npz files are read from folders, not from object storage: use --format shards"
        )
    if format == "npz" and kind == "posterior":
        raise KohyaBucketError(
            "sd-scripts' npz files hold latents, not a distribution: use --format shards with --posterior"
        )


def check_family(encoder: VAEEncoder, name: str) -> None:
    """Refuse, for npz, an unknown model family, or a VAE whose latents have another shape than the family's."""
    if name not in ARCHITECTURES:
        raise KohyaBucketError(
            f"npz files are named by model family, and {name or 'none'!r} is not one: "
            f"add --arch, one of {', '.join(ARCHITECTURES)}"
        )
    arch = ARCHITECTURES[name]
    if (encoder.latent_channels, encoder.downsample_factor) != (arch.channels, arch.stride):
        raise KohyaBucketError(
            f"the VAE has {encoder.latent_channels} channels and divides by {encoder.downsample_factor}; "
            f"{arch.name} has {arch.channels} and divides by {arch.stride}"
        )


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
    **options: Any,
) -> PrecomputeReport:
    """Encode every image of `dataset` that is not in `output_dir` as it should be.

    Each of several processes encodes its share, if it says which one it is; they need not be connected, and none waits
    for another. What is missing because one ended early is encoded by starting again.

    Args:
        dataset: a `BucketedDataset`, or anything with `paths`, `sizes`, `placement` and, if it has any, `captions`.
        encoder: any `VAEEncoder`. With a `posterior` method, raw latents are stored; without, scaled ones.
        output_dir: the store's folder; for npz None puts files beside the images.
        batch_size: images in one call of the encoder.
        dtype: storage type: "float32", "float16" or "bfloat16", or torch's; npz are always float32.
        flip: also store mirrored images.
        mask: also store the alpha channel.
        posterior: store mean and standard deviation, which are sampled at every read.
        format: "shards" or "npz" (sd-scripts' own files).
        architecture: sd-scripts' name of the model family; needed for npz, if the encoder does not know it.
        interpolation: filter of the resize, see `images.resize.INTERPOLATIONS`.
        collection: part of the store, to keep latents of several models or resolutions apart.
        images_root: folder the sources' names start from; None: the common one, or the one of the store.
        content_hash: store a hash of each file, so that a copied or touched image counts as unchanged.
        progress_callback: called with (done, to do) in items of this process' share.
        options: see `encode_items`. `rank` and `processes`: this is process `rank` of so many, which all have the same
            other arguments. Before the store is read in the same program, wait for the others.

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
    check_encoder(encoder)
    paths, placement, captions = _of(dataset)
    root = common_root(paths, output_dir) if images_root is None else Path(os.path.abspath(images_root))
    encoding = EncodeOptions(
        encoder_hash(encoder), dtype_name(dtype), "posterior" if as_flag("posterior", posterior) else "latents",
        as_flag("flip", flip), as_flag("mask", mask), interpolation, collection,
    )  # fmt: skip
    wanted = LatentItems.from_placement(
        paths, dataset.sizes, placement, encoding, root, captions=captions,
        content_hash=as_flag("content_hash", content_hash),
    )  # fmt: skip
    return encode_items(
        wanted, encoder, output_dir, root, batch_size=batch_size, format=format, architecture=architecture,
        progress_callback=progress_callback, **options,
    )  # fmt: skip


def _of(dataset: Any) -> tuple[list[str], Placement, list[str | None] | None]:
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
        placement = place(dataset.rule, dataset.sizes, getattr(dataset, "focus", None))
    captions = getattr(dataset, "captions", None)
    if captions is None and hasattr(source, "caption"):
        captions = [source.caption(i) or None for i in range(len(paths))]
    return [os.fspath(path) for path in paths], placement, captions


class TextEncoder(Protocol):
    """What `precompute_text` encodes with.

    Attributes:
        weights: hash of its weights, "" where it is unknown; others are encoded again.
        tokens: how captions become tokens, in one line of words; what says otherwise is encoded again.
    """

    weights: str
    tokens: str

    def encode(self, captions: Sequence[str]) -> list[Mapping[str, Array]]:
        """For each caption its outputs by name; bfloat16 as float32, which is stored as bfloat16 again."""
        ...


class TextRun:
    """The distinct captions of the latents in `store`, and which of a process' share must be encoded.

    Attributes:
        items: the captions of this share.
        to_do: positions of those that must be encoded, by length.

    Raises:
        LatentStoreError: there is no store, or its folder cannot be written.
    """

    def __init__(
        self, store: str | os.PathLike[str], encoding: Encoding, name: str, rank: int = 0, processes: int = 1
    ) -> None:
        latents = LatentStore(store)
        texts = sorted({text or "" for text in latents.table["caption"].unique().to_pylist()})
        root = latents.layout.root
        if not texts:
            raise LatentStoreError(f"{root} holds no latents, so no captions: run `kohya-bucket precompute`")
        self._all = CaptionItems(list(map(Caption, texts)), encoding, name)
        self.items = CaptionItems(self._all.captions[rank::processes], encoding, name)
        self.sink = ShardSink(root / TEXT_FOLDER, self.items)
        missing, reasons = self.sink.missing()
        self.to_do: list[int] = sorted(np.flatnonzero(missing).tolist(), key=lambda i: len(self.items.captions[i].text))
        self.report = PrecomputeReport(
            root / TEXT_FOLDER, len(texts), len(self.items) - len(self.to_do), reasons=reasons,
            elsewhere=len(texts) - len(self.items),
        )  # fmt: skip

    def finish(self) -> None:
        """Commit and index."""
        self.sink.flush()
        self.report.notes += self.sink.finish(self._all)


def precompute_text(
    store: str | os.PathLike[str], encoder: TextEncoder, *, name: str = "text", batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None, rank: int = 0, processes: int = 1,
) -> PrecomputeReport:  # fmt: skip
    """Encode each distinct caption of the latents in `store`, for `BucketedLatentDataset(store, text_outputs=name)`.

    Each of several processes takes its share, if it says which one it is. What is encoded when the run is interrupted
    stays.

    Args:
        store: folder of a store of latents; the outputs go to its folder `text`.
        name: the outputs' own, to keep those of several encoders apart.
        batch_size: captions per run of the encoder.
        progress: called with (done, to do) in captions.
        rank, processes: this is process `rank` of so many.

    Raises:
        LatentStoreError: there is no store, its folder cannot be written, or an output cannot be stored.
    """
    run = TextRun(store, Encoding(encoder.weights, encoder.tokens), name, rank, processes)
    try:
        for start in range(0, len(run.to_do), batch_size):
            batch = run.to_do[start : start + batch_size]
            run.items.add(run.sink.writer, batch, encoder.encode([str(run.items.captions[i].text) for i in batch]))
            run.report.encoded += len(batch)
            if progress is not None:
                progress(run.report.encoded, len(run.to_do))
    finally:
        run.finish()
    return run.report
