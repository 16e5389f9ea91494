"""The keys that musubi-tuner takes where, and of which kind their values must be.

It checks them by `isinstance`, so true is a whole number to it, and 30 no fraction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CLIPS", "DEPRECATED", "GENERAL", "IMAGES", "SOURCES", "Kind"]


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        text: what must be given, for messages.
        fits: whether a value is one.
        taken: what becomes of it.
    """

    text: str
    fits: Callable[[Any], bool]
    taken: Callable[[Any], Any] = lambda value: value


def _whole(value: Any) -> bool:
    return isinstance(value, int)


def _pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_whole, value))


_TEXT = Kind("a text in quotes", lambda value: isinstance(value, str))
_WHOLE = Kind("a whole number", _whole)
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_FRACTION = Kind("a number with a point, e.g. 30.0", lambda value: isinstance(value, float))
_WHOLES = Kind("a list of whole numbers, e.g. [1, 25, 45]",
               lambda value: isinstance(value, list) and all(map(_whole, value)), tuple)  # fmt: skip
_SIZE = Kind("a whole number or two of them, [width, height]", lambda value: _whole(value) or _pair(value),
             lambda value: (value, value) if _whole(value) else tuple(value))  # fmt: skip

GENERAL: Mapping[str, Kind] = {
    "caption_extension": _TEXT,
    "batch_size": _WHOLE,
    "num_repeats": _WHOLE,
    "resolution": _SIZE,
    "enable_bucket": _FLAG,
    "bucket_no_upscale": _FLAG,
}
"""Keys that every data set takes, and `[general]` for all of them."""

_BOTH = {"cache_directory": _TEXT, "control_directory": _TEXT, "fp_latent_window_size": _WHOLE}

IMAGES: Mapping[str, Kind] = {
    **GENERAL,
    **_BOTH,
    "image_directory": _TEXT,
    "image_jsonl_file": _TEXT,
    "multiple_target": _FLAG,
    "fp_1f_clean_indices": _WHOLES,
    "fp_1f_target_index": _WHOLE,
    "fp_1f_no_post": _FLAG,
    "no_resize_control": _FLAG,
    "control_resolution": _SIZE,
}
"""Keys of a data set of images."""

CLIPS: Mapping[str, Kind] = {
    **GENERAL,
    **_BOTH,
    "video_directory": _TEXT,
    "video_jsonl_file": _TEXT,
    "target_frames": _WHOLES,
    "frame_extraction": _TEXT,
    "frame_stride": _WHOLE,
    "frame_sample": _WHOLE,
    "max_frames": _WHOLE,
    "source_fps": _FRACTION,
}
"""Keys of a data set of clips."""

SOURCES = ("image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file")
"""Keys that say where the items are; one of them tells a config of musubi-tuner from one of sd-scripts."""

DEPRECATED: Mapping[str, str] = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
"""Old names of keys, which it still takes."""
