"""Encode a dataset once: on every GPU of every node, whatever dies, and only what is missing or stale."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.checks import as_flag
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.encode.report import PrecomputeReport
from kohya_bucket.latents.encode.sinks import NpzSink, ShardSink
from kohya_bucket.latents.encode.work_claims import WorkBoard
from kohya_bucket.latents.encode.worker import PrecomputeWorker
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, is_text
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.vae.encoder import PosteriorEncoder, VAEEncoder, check_encoder, encoder_hash, encoder_space

__all__ = ["PrecomputeReport", "common_root", "encode_items", "precompute_latents"]


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
        interpolation: filter of the resize, see `images.pixels.resize.INTERPOLATIONS`.
        collection: part of the store, to keep latents of several models or resolutions apart.
        images_root: folder the sources' names start from; None: the common one, or the one of the store.
        content_hash: store a hash of each file, so that a copied or touched image counts as unchanged.
        progress_callback: called with (done, to do) in items.
        settings: see `encode_items`.

    Raises:
        KohyaBucketError: settings that do not fit together, or a folder that cannot be written.
    """
    check_encoder(encoder)
    paths, placement, captions = _of(dataset)
    root = _images_root(paths, output_dir, images_root)
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
        progress_callback=progress_callback, **settings,
    )  # fmt: skip


def encode_items(
    wanted: LatentItems,
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
    sd_scripts: str = "",
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
        sd_scripts: the version that will read the npz, e.g. "0.10.1"; "" for the newest.
    """
    if workers is not None and workers < 1:
        raise KohyaBucketError(f"workers is {workers}, but must be 1 or more; leave it out for one per processor")
    _check(wanted.encoding, encoder, output_dir, format, architecture or str(getattr(encoder, "architecture", "")))
    if format == "npz":  # whatever the VAE computes in, these files hold float32
        wanted = replace(wanted, encoding=replace(wanted.encoding, dtype="float32"))
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

    run = PrecomputeWorker(
        wanted, encoder, batch_size, report, tell, progress_callback, workers or os.cpu_count() or 1, seed
    )
    space = encoder_space(encoder)
    sink: ShardSink | NpzSink
    if format == "npz":
        arch = ARCHITECTURES[architecture or str(getattr(encoder, "architecture", ""))].read_by(sd_scripts)
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


def _distinct(wanted: LatentItems) -> tuple[LatentItems, list[str]]:
    """One item per row of a store, the last where an image comes again; and the images whose names no row can hold."""
    last = {source: i for i, source in enumerate(wanted.sources)}
    keep = [i for i in last.values() if is_text(wanted.sources[i])]
    nameless = [wanted.paths[i] for i in last.values() if not is_text(wanted.sources[i])]
    if len(keep) < len(wanted):
        wanted = replace(wanted.subset(keep), without_bucket=wanted.without_bucket)
    return wanted, nameless


def _finish_store(sink: ShardSink, wanted: LatentItems) -> None:
    """Index the store; captions that changed since, and hashes that were not asked for before, need no encoding."""
    store = sink.store
    store.refresh()
    at = store.find(wanted.sources, wanted.encoding.collection)
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
    encoding: EncodeOptions,
    encoder: VAEEncoder,
    output_dir: str | os.PathLike[str] | None,
    format: str,
    architecture: str,
) -> None:
    if format not in ("shards", "npz"):
        raise KohyaBucketError(f"format {format!r}: use 'shards' or 'npz'")
    if format == "shards" and output_dir is None:
        raise KohyaBucketError("shards need an output folder: give --output")
    if encoding.kind == "posterior" and not isinstance(encoder, PosteriorEncoder):
        raise KohyaBucketError(
            f"{type(encoder).__name__} has no posterior method, so there is no distribution to store: "
            "leave out --posterior"
        )
    if format == "npz":
        if encoding.kind == "posterior":
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
