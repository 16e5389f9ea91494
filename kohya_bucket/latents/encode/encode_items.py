"""Items into a store or npz: what is missing or stale is encoded, together with whatever other process is at it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kohya_bucket.buckets.sizes import as_pair, size_keys, sizes_of_keys
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.encode.npz_sink import NpzSink
from kohya_bucket.latents.encode.report import PrecomputeReport
from kohya_bucket.latents.encode.shard_sink import ShardSink
from kohya_bucket.latents.encode.sinks import Sink
from kohya_bucket.latents.encode.work_claims import WorkBoard
from kohya_bucket.latents.encode.worker import PrecomputeWorker
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.remote.remote_path import RemotePath, as_given
from kohya_bucket.latents.store.layout import is_text
from kohya_bucket.latents.vae.encoder import PosteriorEncoder, VAEEncoder, encoder_space

__all__ = ["check_family", "check_kind", "check_target", "distinct", "encode_items", "finish"]

_NAMELESS = "its name is not UTF-8, and a store cannot hold such names: rename it, or use --format npz"


def encode_items(
    wanted: LatentItems, encoder: VAEEncoder, output_dir: str | os.PathLike[str] | None, images_root: Path, *,
    batch_size: int = 8, format: str = "shards", architecture: str = "",
    progress_callback: Callable[[int, int], None] | None = None, say: Callable[[str], None] | None = None,
    workers: int | None = None, seed: int = 0, shard_bytes: int = 256 << 20, flush_seconds: float | None = 60.0,
    stale_after: float = 30.0, sync: bool = True, npz_paths: Sequence[Path] | None = None, sd_scripts: str = "",
) -> PrecomputeReport:  # fmt: skip
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
    architecture = architecture or str(getattr(encoder, "architecture", ""))
    _check(wanted.encoding, encoder, output_dir, format, architecture)
    nameless: list[str] = []
    if format == "npz":  # whatever the VAE computes in, these files hold float32
        wanted = replace(wanted, encoding=replace(wanted.encoding, dtype="float32"))
    else:
        wanted, nameless = distinct(wanted)
    output = None if output_dir is None else as_given(output_dir)
    report = PrecomputeReport(output, len(wanted) + len(nameless), without_bucket=wanted.without_bucket)
    worker = PrecomputeWorker(
        wanted, encoder, batch_size, report, say, progress_callback, workers or os.cpu_count() or 1, seed
    )
    space = encoder_space(encoder)
    sink: Sink
    if format == "npz" or output is None:
        arch = ARCHITECTURES[architecture].read_by(sd_scripts)
        assert not isinstance(output, RemotePath)  # which `_check` refuses
        sink = NpzSink(output, wanted, space, arch, images_root, worker.safe, paths=npz_paths, sync=sync)
    else:
        sink = ShardSink(
            output, wanted, space, images_root, worker.safe, shard_bytes=shard_bytes, flush_seconds=flush_seconds
        )
    for note in sink.notes:
        worker.tell(note)
    started = time.monotonic()
    if len(wanted):
        with WorkBoard(sink.work, stale_after=stale_after) as board:
            worker.through(sink, board)
    report.seconds = time.monotonic() - started
    finish(report, wanted, nameless, sink, worker.tell)
    return report


def finish(
    report: PrecomputeReport, wanted: LatentItems, nameless: list[str], sink: Sink, tell: Callable[[str], None]
) -> None:
    """What every engine does at the end: name what no row can hold, index, and count."""
    for path in nameless:
        report.failed.append((path, _NAMELESS))
        tell(f"{path!a}: {_NAMELESS}")
    sink.finish()
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


def _check(
    encoding: EncodeOptions,
    encoder: VAEEncoder,
    output_dir: str | os.PathLike[str] | None,
    format: str,
    architecture: str,
) -> None:
    check_target(encoding.kind, output_dir, format)
    check_kind(encoding.kind, isinstance(encoder, PosteriorEncoder), type(encoder).__name__)
    if format == "npz":
        if architecture not in ARCHITECTURES:
            raise KohyaBucketError(
                f"npz files are named by model family, and {architecture or 'none'!r} is not one: "
                f"add --arch, one of {', '.join(ARCHITECTURES)}"
            )
        check_family(encoder, ARCHITECTURES[architecture])


def check_kind(kind: str, posterior: bool, encoder: str) -> None:
    """Refuse to store the distribution of an encoder that gives none; `encoder` is the name of its class."""
    if kind == "posterior" and not posterior:
        raise KohyaBucketError(
            f"{encoder} has no posterior method, so there is no distribution to store: leave out --posterior"
        )


def check_target(kind: str, output_dir: str | os.PathLike[str] | None, format: str) -> None:
    """Refuse what cannot be written, whatever the encoder.

    Raises:
        KohyaBucketError: an unknown format, shards without a folder, npz in object storage, or a distribution
            in npz.
    """
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


def check_family(encoder: VAEEncoder, arch: Architecture) -> None:
    """Refuse a VAE whose latents have another shape than the model family's."""
    if (encoder.latent_channels, encoder.downsample_factor) != (arch.channels, arch.stride):
        raise KohyaBucketError(
            f"the VAE has {encoder.latent_channels} channels and divides by {encoder.downsample_factor}; "
            f"{arch.name} has {arch.channels} and divides by {arch.stride}"
        )
