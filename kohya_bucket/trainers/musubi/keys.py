"""The keys of a dataset: where each may stand, its type and default, and where its images and clips go by them.

Source of names and defaults: kohya-ss/musubi-tuner 0.3.6, `dataset/config_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.clips import ClipBuckets
from kohya_bucket.buckets.rule import BucketRule
from kohya_bucket.buckets.rules.fixed import OneBucket
from kohya_bucket.buckets.trainers import MusubiTunerBuckets
from kohya_bucket.trainers.door.config_source import (
    FLAG,
    FRACTION,
    MOST_REPEATS,
    ONE_OR_MORE,
    SIDES,
    SIZE,
    TEXT,
    WHOLE,
    WHOLES,
    Type,
)
from kohya_bucket.trainers.musubi.architectures import Family
from kohya_bucket.trainers.musubi.checkout import clips_always_in_buckets, known_checkout


def _key(type_: Type, default: Any, *, general: bool = False, allowed: Type | None = None) -> Any:
    """One key: its type and default, whether it may stand in [general], and its range."""
    return field(default=default, metadata={"type": type_, "general": general, "allowed": allowed})


@dataclass(frozen=True)
class CommonKeys:
    """What images and clips have in common. Sizes are (width, height). The fields are the keys."""

    what: ClassVar[str] = "image"
    _source: ClassVar[str] = "image"

    resolution: tuple[int, int] = _key(SIZE, (960, 544), general=True, allowed=SIDES)
    enable_bucket: bool = _key(FLAG, False, general=True)
    bucket_no_upscale: bool = _key(FLAG, False, general=True)
    caption_extension: str | None = _key(TEXT, None, general=True)
    batch_size: int = _key(WHOLE, 1, general=True, allowed=ONE_OR_MORE)
    num_repeats: int = _key(WHOLE, 1, general=True)
    cache_directory: str | None = _key(TEXT, None)
    control_directory: str | None = _key(TEXT, None)
    fp_latent_window_size: int = _key(WHOLE, 9)

    @property
    def times(self) -> int:
        """How often each item is trained in an epoch."""
        return min(max(self.num_repeats, 0), MOST_REPEATS)

    @property
    def directory(self) -> str | None:
        """The folder that is listed, if one is."""
        return getattr(self, f"{self._source}_directory", None)

    @property
    def jsonl_file(self) -> str | None:
        """The list of items, if one is given; a folder comes first."""
        return getattr(self, f"{self._source}_jsonl_file", None)

    @property
    def caches(self) -> str | None:
        return self.cache_directory if self.cache_directory is not None else self.directory

    def mode(self, model: Family) -> tuple[bool, bool]:
        """Whether images or clips go into buckets, and whether small ones keep their size there."""
        return self.enable_bucket, self.enable_bucket and self.bucket_no_upscale

    def picture_rule(self, model: Family) -> BucketRule:
        """Where an image goes, or a frame of a clip.

        Raises:
            BucketSettingsError: a resolution from which no bucket follows.
        """
        in_buckets, no_upscale = self.mode(model)
        if in_buckets:
            return MusubiTunerBuckets(self.resolution, model.steps, no_upscale)
        return OneBucket(self.resolution)


@dataclass(frozen=True)
class ImageKeys(CommonKeys):
    """A dataset of images."""

    image_directory: str | None = _key(TEXT, None)
    image_jsonl_file: str | None = _key(TEXT, None)
    multiple_target: bool = _key(FLAG, False)
    fp_1f_clean_indices: tuple[int, ...] | None = _key(WHOLES, None)
    fp_1f_target_index: int | None = _key(WHOLE, None)
    fp_1f_no_post: bool = _key(FLAG, False)
    no_resize_control: bool = _key(FLAG, False)
    control_resolution: tuple[int, int] | None = _key(SIZE, None)


@dataclass(frozen=True)
class ClipKeys(CommonKeys):
    """A dataset of clips."""

    what: ClassVar[str] = "clip"
    _source: ClassVar[str] = "video"

    video_directory: str | None = _key(TEXT, None)
    video_jsonl_file: str | None = _key(TEXT, None)
    target_frames: tuple[int, ...] = _key(WHOLES, (1,))
    frame_extraction: str = _key(TEXT, "head")
    frame_stride: int = _key(WHOLE, 1)
    frame_sample: int = _key(WHOLE, 1)
    max_frames: int = _key(WHOLE, 129)
    source_fps: float | None = _key(FRACTION, None)

    def mode(self, model: Family) -> tuple[bool, bool]:
        always = clips_always_in_buckets(known_checkout(model.trainer))
        return (True, False) if always else super().mode(model)

    def clip_rule(self, model: Family) -> ClipBuckets:
        """Where clips go, and which runs of their frames.

        Raises:
            BucketSettingsError: numbers from which no runs follow.
        """
        return ClipBuckets(
            self.picture_rule(model),
            self.target_frames,
            grid=model.grid,
            extraction=self.frame_extraction,
            stride=self.frame_stride,
            sample=self.frame_sample,
            max_frames=self.max_frames,
            target_fps=model.target_fps,
            by_time=model.by_time,
        )

    def rates(self, model: Family, fps: npt.NDArray[np.float64]) -> float | npt.NDArray[np.float64] | None:
        """What `ClipBuckets.place` takes for `source_fps`, for clips whose files say `fps` (0 where they do not)."""
        if not model.by_time or model.target_fps is None:
            return self.source_fps
        return np.where(fps > 0, fps, model.target_fps)


def dataset_of(arguments: Mapping[str, Any], of_clips: bool) -> CommonKeys:
    """A dataset in buckets, of the keys that are not None; without `target_frames` it trains all frames."""
    values = {"enable_bucket": True, **{name: value for name, value in arguments.items() if value is not None}}
    if not of_clips:
        return ImageKeys(**values)
    return ClipKeys(**values if "target_frames" in values else values | {"frame_extraction": "full"})


def _types(of: type[CommonKeys], *, general: bool = False) -> dict[str, Type]:
    return {f.name: f.metadata["type"] for f in fields(of) if f.metadata["general"] or not general}


GENERAL: Mapping[str, Type] = _types(CommonKeys, general=True)
"""Keys that every dataset takes, and `[general]` for all of them."""

IMAGES: Mapping[str, Type] = _types(ImageKeys)
CLIPS: Mapping[str, Type] = _types(ClipKeys)

SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
"""Keys that say where the items are; one of them tells a config of musubi-tuner from one of sd-scripts."""

DEPRECATED: Mapping[str, str] = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
"""Old names of keys, which it still takes."""

OWN_SIZES = ("no_resize_control", "control_resolution", *DEPRECATED)
"""Keys by which control images have sizes of their own, and are not cut to the bucket of their image."""

CONTROL_IN_THE_MIDDLE = (
    "focus is set, but control images have sizes of their own here (no_resize_control, control_resolution): they are "
    "cut in the middle"
)
