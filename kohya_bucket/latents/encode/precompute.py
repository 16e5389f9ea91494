"""Encode a dataset once: on every GPU of every node, whatever dies, and only what is missing or stale."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.checks import as_flag
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.encode.encode_items import encode_items
from kohya_bucket.latents.encode.report import PrecomputeReport
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.latent_space import dtype_name
from kohya_bucket.latents.store.layout import common_root
from kohya_bucket.latents.vae.encoder import VAEEncoder, check_encoder, encoder_hash

__all__ = ["PrecomputeReport", "precompute_latents"]


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
        interpolation: filter of the resize, see `images.resize.INTERPOLATIONS`.
        collection: part of the store, to keep latents of several models or resolutions apart.
        images_root: folder the sources' names start from; None: the common one, or the one of the store.
        content_hash: store a hash of each file, so that a copied or touched image counts as unchanged.
        progress_callback: called with (done, to do) in items.
        options: see `encode_items`.

    Raises:
        KohyaBucketError: options that do not fit together, or a folder that cannot be written.
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
