"""The rules that musubi-tuner places by, from the keys of a data set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips import ClipBuckets
from kohya_bucket.buckets.rule import BucketRule
from kohya_bucket.buckets.rules.fixed import OneBucket
from kohya_bucket.buckets.trainers import MusubiTunerBuckets
from kohya_bucket.musubi.architectures import Architecture
from kohya_bucket.musubi.checkout import clips_always_in_buckets, known_checkout
from kohya_bucket.musubi.config import ClipKeys, DatasetKeys

__all__ = ["ANY", "clip_rule", "picture_mode", "picture_rule", "rates_of"]

ANY = Architecture("", "", "any model but HiDream-O1 and MiniMax-H3", ())
"""What all architectures but two have in common, for when nobody says which it is."""


def picture_mode(keys: DatasetKeys, architecture: Architecture | None) -> tuple[bool, bool]:
    """Whether images or clips go into buckets, and whether small ones keep their size there."""
    if isinstance(keys, ClipKeys) and clips_always_in_buckets(known_checkout((architecture or ANY).trainer)):
        return True, False
    return keys.enable_bucket, keys.enable_bucket and keys.bucket_no_upscale


def picture_rule(keys: DatasetKeys, architecture: Architecture | None) -> BucketRule:
    """Where an image goes, or a frame of a clip.

    Raises:
        BucketSettingsError: a resolution from which no bucket follows.
    """
    in_buckets, no_upscale = picture_mode(keys, architecture)
    if in_buckets:
        return MusubiTunerBuckets(keys.resolution, (architecture or ANY).steps, no_upscale)
    return OneBucket(keys.resolution)


def clip_rule(keys: ClipKeys, architecture: Architecture | None) -> ClipBuckets:
    """Where clips go, and which runs of their frames.

    Raises:
        BucketSettingsError: numbers from which no runs follow.
    """
    model = architecture or ANY
    return ClipBuckets(
        picture_rule(keys, model),
        keys.target_frames,
        grid=model.grid,
        extraction=keys.frame_extraction,
        stride=keys.frame_stride,
        sample=keys.frame_sample,
        max_frames=keys.max_frames,
        target_fps=model.target_fps,
        by_time=model.by_time,
    )


def rates_of(
    keys: ClipKeys, architecture: Architecture | None, fps: npt.NDArray[np.float64]
) -> float | npt.NDArray[np.float64] | None:
    """What `ClipBuckets.place` takes for `source_fps`, for clips whose files say `fps` (0 where they do not)."""
    model = architecture or ANY
    if not model.by_time or model.target_fps is None:
        return keys.source_fps
    return np.where(fps > 0, fps, model.target_fps)
