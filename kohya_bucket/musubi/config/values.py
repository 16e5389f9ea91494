"""What values mean for the training, beyond being of the right kind."""

from __future__ import annotations

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.buckets.choices import EXTRACTIONS
from kohya_bucket.checks import nearest
from kohya_bucket.musubi.architectures import ARCHITECTURES, Architecture
from kohya_bucket.musubi.checkout import clips_always_in_buckets, known_checkout
from kohya_bucket.musubi.config.model import ClipKeys, DatasetKeys

__all__ = ["check_values", "usable_lengths"]

_EXTRACTIONS = [name for name in EXTRACTIONS if name != "largest"]  # which is not musubi-tuner's


def check_values(keys: DatasetKeys, place: str, architecture: Architecture | None, findings: Findings) -> None:
    """Report values that musubi-tuner takes and cannot train with, or not as meant."""
    if min(keys.resolution) < 1:
        message = f"resolution is {keys.resolution[0]}x{keys.resolution[1]}, from which no bucket follows"
        findings.error("resolution", place, message, "give sides in pixels, e.g. [960, 544]")
    if keys.batch_size < 1:
        findings.error("batch-size", place, f"batch_size is {keys.batch_size}", "give 1 or more")
    if keys.batch_size > 1 and architecture is not None and architecture.name == "mmh3":
        message = f"batch_size is {keys.batch_size}, but {architecture.title} trains one item at a time"
        findings.error("batch-size", place, f"{message}: musubi-tuner stops at the first batch", "set batch_size = 1")
    if keys.num_repeats < 1:
        message = f"num_repeats is {keys.num_repeats}, so nothing of it is trained"
        findings.warning("no-repeats", place, message, "set it to 1 or more, or remove the data set")
    if keys.caption_extension is not None and not keys.caption_extension.startswith("."):
        message = f"caption_extension is {keys.caption_extension!r}: im.png needs a caption im{keys.caption_extension}"
        findings.warning("caption-extension", place, message, f"begin it with a dot: '.{keys.caption_extension}'")
    elif keys.caption_extension is None and keys.directory is not None:
        message = "names no caption_extension, so musubi-tuner stops when it looks for captions"
        findings.error("caption-extension", place, message, "set it, e.g. caption_extension = '.txt'")
    if keys.bucket_no_upscale and not keys.enable_bucket:
        findings.note("no-upscale", place, "bucket_no_upscale does nothing while enable_bucket is off", "set both")
    if isinstance(keys, ClipKeys):
        _check_clips(keys, place, architecture, findings)


def usable_lengths(keys: ClipKeys) -> bool:
    """Whether runs of frames follow from the keys."""
    numbers = min(keys.frame_stride, keys.frame_sample, keys.max_frames) > 0
    lengths = keys.frame_extraction == "full" or min(keys.target_frames, default=0) > 0
    rate = keys.source_fps is None or 0 < keys.source_fps < float("inf")
    return keys.frame_extraction in _EXTRACTIONS and numbers and lengths and rate


def _check_clips(keys: ClipKeys, place: str, architecture: Architecture | None, findings: Findings) -> None:
    if keys.frame_extraction not in _EXTRACTIONS:
        near = nearest(keys.frame_extraction, _EXTRACTIONS) if keys.frame_extraction else "head"
        message = f"frame_extraction is {keys.frame_extraction!r}, at which musubi-tuner stops"
        findings.error("frame-extraction", place, message, f"use one of {', '.join(_EXTRACTIONS)}; nearest: {near}")
    elif not usable_lengths(keys):
        shown = {name: getattr(keys, name) for name in ("target_frames", "frame_stride", "frame_sample", "max_frames")}
        values = ", ".join(f"{name} {_shown(value)}" for name, value in shown.items())
        message = f"{values}, source_fps {keys.source_fps}: no frames follow from one of these"
        findings.error("frames", place, message, "give numbers of 1 or more, and a rate above 0")
    elif architecture is not None and keys.frame_extraction != "full":
        if min(keys.target_frames) < architecture.grid.base:
            message = f"target_frames {list(keys.target_frames)}: {architecture.title} needs {architecture.grid.base} "
            findings.error("frames", place, f"{message}frames or more, and musubi-tuner stops", "list longer ones")
            return
        lengths = architecture.grid.lengths(keys.target_frames)
        if set(lengths) != set(keys.target_frames):
            message = f"target_frames {list(keys.target_frames)} are rounded to {list(lengths)}"
            findings.note("target-frames", place, message, f"{architecture.title} takes {architecture.grid} frames")
    if architecture is not None and architecture.target_fps is None:
        able = ", ".join(a.name for a in ARCHITECTURES.values() if a.target_fps is not None)
        message = f"{architecture.title} trains no clips in musubi-tuner"
        findings.error("no-clips", place, message, f"--arch is one of {able} for clips")
    if architecture is not None and architecture.by_time and keys.source_fps is not None:
        message = f"source_fps is ignored: {architecture.title}'s clips are brought to "
        findings.note("source-fps", place, f"{message}{architecture.target_fps:g} frames per second by their times", "")
    if architecture is None and keys.source_fps is not None:
        message = f"source_fps is {keys.source_fps}, but how many frames are left depends on the model"
        findings.error("no-architecture", place, message, "name it, e.g. --arch wan")
    _check_clip_buckets(keys, place, architecture, findings)


def _check_clip_buckets(keys: ClipKeys, place: str, architecture: Architecture | None, findings: Findings) -> None:
    """What `enable_bucket` and `bucket_no_upscale` mean for clips, which depends on musubi-tuner's version."""
    if keys.enable_bucket and not keys.bucket_no_upscale:
        return
    package = known_checkout(architecture.trainer if architecture else None)
    if package is None:
        message = "clips are shown as the newest musubi-tuner places them; up to 0.3.4 it puts them in buckets and "
        message += "enlarges them, whatever enable_bucket and bucket_no_upscale say"
        findings.note("clip-buckets", place, message, "to see yours, name its trainer's path with --arch")
    if not clips_always_in_buckets(package):
        if not keys.enable_bucket:
            message = f"enable_bucket is off, so every clip is cut to {keys.resolution[0]}x{keys.resolution[1]}"
            findings.note("one-size", place, message, "for buckets, set enable_bucket = true")
        return
    if keys.bucket_no_upscale:
        message = "this musubi-tuner ignores bucket_no_upscale for clips: they are enlarged to their bucket"
        findings.note("no-upscale", place, message, "")
    if not keys.enable_bucket:
        message = "enable_bucket is off, but this musubi-tuner caches clips in buckets all the same, and without the "
        message += "plan a batch of clips of different sizes ends the training"
        findings.warning("clips-without-buckets", place, message, "set enable_bucket = true")


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
