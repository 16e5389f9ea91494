"""What of a data set's settings decides its latents, as a note states it."""

from __future__ import annotations

import json
from typing import Any

from kohya_bucket.latents.fingerprint import UNKNOWN_VAE, Fingerprint
from kohya_bucket.musubi.caching.note import Settings
from kohya_bucket.musubi.caching.sources import Identity
from kohya_bucket.musubi.objects import CachedDataset, Selector

__all__ = ["UNSAID", "fingerprint_of_clip", "fingerprint_of_image", "holds_clips", "settings_of", "settings_of_text"]

_SETTINGS = (
    "multiple_target", "no_resize_control", "control_resolution", "flux_kontext_no_resize_control",
    "qwen_image_edit_no_resize_control", "qwen_image_edit_control_resolution", "fp_1f_clean_indices",
    "fp_1f_target_index", "fp_1f_no_post",
)  # fmt: skip
_OF_CLIPS = (
    "resolution", "frame_extraction", "frame_stride", "frame_sample", "target_frames", "max_frames", "source_fps",
)  # fmt: skip
UNSAID: Settings = {"bucket_no_upscale": False, "further keys": ""}
"""What notes did not say while nothing else was possible."""
_WINDOW, _WINDOWED = "fp_latent_window_size", ("fp", "wan")


def holds_clips(dataset: CachedDataset) -> bool:
    """Whether a data set is of videos."""
    return hasattr(dataset, "frame_extraction")


def settings_of(dataset: CachedDataset, selector: Selector) -> Settings:
    """Keys of the config that decide what is encoded, with their values as JSON has them.

    The resolution of images is not among them: it decides their buckets, and those are compared.
    """
    names = (*_SETTINGS, *(_OF_CLIPS if holds_clips(dataset) else ()))
    names += (_WINDOW,) if dataset.architecture in _WINDOWED else ()
    given: dict[str, Any] = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
    if holds_clips(dataset):
        given["bucket_no_upscale"] = bool(selector.no_upscale)
    return dict(json.loads(json.dumps(given)))


def settings_of_text(dataset: CachedDataset, further: str) -> Settings:
    """The same for outputs of a text encoder that sees images: in its size, and with further keys of the line."""
    names = (
        "resolution",
        "enable_bucket",
        "bucket_no_upscale",
        *_SETTINGS,
        *(_OF_CLIPS if holds_clips(dataset) else ()),
    )
    given: dict[str, Any] = {name: getattr(dataset, name) for name in names if hasattr(dataset, name)}
    return dict(json.loads(json.dumps(given | {"further keys": further})))


def fingerprint_of_image(
    source: Identity, size: tuple[int, int], bucket: tuple[int, int], vae: str, dtype: str
) -> Fingerprint:
    """Resized to cover the bucket and cut out of the middle, as `resize_image_to_bucket` of musubi-tuner does."""
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    resized = int(size[0] * scale + 0.5), int(size[1] * scale + 0.5)
    interpolation = "lanczos/pillow" if scale > 1 else "area/cv2"
    if size == bucket:
        resized, interpolation = size, "none"
    crop = (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2
    return Fingerprint(*source, vae or UNKNOWN_VAE, bucket, resized, crop, interpolation, dtype)


def fingerprint_of_clip(source: Identity, size: tuple[int, int], vae: str, dtype: str) -> Fingerprint:
    """Frames are resized while they are read, and their own size is not kept: the settings decide it."""
    return Fingerprint(*source, vae or UNKNOWN_VAE, size, size, (0, 0), "none", dtype)
