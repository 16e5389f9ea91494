"""Caches that do not say what they were made from, as musubi-tuner writes them: judged as far as that goes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kohya_bucket.images.clips import read_clips
from kohya_bucket.latents.stale import Reason, Stale
from kohya_bucket.musubi.caching.families import Family
from kohya_bucket.musubi.caching.names import CacheName
from kohya_bucket.musubi.caching.tensor_file import TensorFile
from kohya_bucket.musubi.objects import CachedDataset, Selector

__all__ = ["latent_size", "why_unmarked_clip", "why_unmarked_image", "why_unmarked_text"]

_MAIN = re.compile(r"latents_(?:\d+x)?(\d+)x(\d+)_")


def latent_size(header: TensorFile) -> tuple[int, int] | None:
    """(width, height) of the latents that are trained, by their name."""
    found = next(filter(None, map(_MAIN.match, header.shapes)), None)
    return None if found is None else (int(found[2]), int(found[1]))


def why_unmarked_image(
    family: Family, files: Iterable[str], name: CacheName, header: TensorFile, bucket: tuple[int, int]
) -> list[Reason]:
    """Older than a file that it is made from, of an image of another size, or of another bucket."""
    from PIL import Image

    files = tuple(files)
    try:
        with Image.open(files[0]) as image:
            if image.size != name.size:
                return [Reason(Stale.IMAGE_SIZE, *name.size, *image.size)]
    except Exception:  # what it is of cannot be read, which is said elsewhere
        return _why_older(name.path, files)
    return _why_other_bucket(family, header, bucket) or _why_older(name.path, files)


def why_unmarked_clip(
    dataset: CachedDataset,
    selector: Selector,
    family: Family,
    files: Iterable[str],
    name: CacheName,
    header: TensorFile,
) -> list[Reason]:
    """As `why_unmarked_image`, or a clip that the data set's settings do not make."""
    bucket = _bucket_of_clip(next(iter(files)), selector) if selector.no_upscale else name.size
    if bucket != name.size:
        return [Reason(Stale.BUCKET, "x".join(map(str, name.size)), "x".join(map(str, bucket)))]
    wanted = [] if name.clip is None else _why_no_such_clip(dataset, *name.clip)
    return wanted or _why_other_bucket(family, header, name.size) or _why_older(name.path, files)


def _bucket_of_clip(file: str, selector: Selector) -> tuple[int, int]:
    """Where the frames of a clip go by their size in the file; none if it cannot be read."""
    width, height = read_clips([file]).sizes[0].tolist()
    return selector.get_bucket_resolution((width, height)) if min(width, height) > 0 else (0, 0)


def why_unmarked_text(path: Path, seen: Iterable[str]) -> list[Reason]:
    """Older than an image that the encoder saw; the caption is compared by its text."""
    return _why_older(str(path), seen)


def _why_no_such_clip(dataset: Any, first: int, frames: int) -> list[Reason]:
    how = dataset.frame_extraction
    if how == "full":
        fits = first == 0 and frames <= dataset.max_frames
    else:
        steps = {"head": 1 << 30, "chunk": max(1, frames), "slide": max(1, dataset.frame_stride or 1)}
        fits = frames in (dataset.target_frames or ()) and first % steps.get(how, 1) == 0
    return [] if fits else [Reason(Stale.CLIP, frames, first)]


def _why_other_bucket(family: Family, header: TensorFile, bucket: tuple[int, int]) -> list[Reason]:
    latents = latent_size(header)
    if latents is None:
        return [Reason(Stale.PART, "latents")]
    stride, grown = family.stride, family.grown_to
    sizes = [bucket, tuple(-(-side // grown) * grown for side in bucket)]
    if latents in [(size[0] // stride, size[1] // stride) for size in sizes]:
        return []
    return [Reason(Stale.BUCKET, f"{latents[0] * stride}x{latents[1] * stride}", f"{bucket[0]}x{bucket[1]}")]


def _why_older(path: str, files: Iterable[str]) -> list[Reason]:
    made = os.stat(path).st_mtime_ns
    for file in files:
        try:
            if os.stat(file).st_mtime_ns > made:
                return [Reason(Stale.OLDER)]
        except OSError:
            continue
    return []
