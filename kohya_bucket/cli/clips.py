"""Clips on a command line: what is taken of them by the rules of musubi-tuner, and by those of other trainers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kohya_bucket.buckets.clips import ClipBuckets
from kohya_bucket.cli.configs import musubi_config
from kohya_bucket.cli.options import CLIP_SIZE, ClipOptions, RuleArguments, given, refuse_beside
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images.clips import read_clips
from kohya_bucket.reports.trainers import MUSUBI_TUNER, trainer_of
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.musubi.architectures import architecture_named
from kohya_bucket.trainers.musubi.keys import ClipKeys, CommonKeys, ImageKeys

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.trainers.musubi.architectures import Family


_SHOWN = 6


@dataclass(frozen=True)
class Clip:
    """One clip; `fps` is 0 where it is not known, `counted` where a container does not say how many frames it has."""

    size: tuple[int, int]
    frames: int
    fps: float = 0.0
    rotation: int = 0
    counted: bool = False


WayToTrain = tuple[str, "BucketRule", "TakenClip | None"]
"""A name for the reader, where a picture goes, and what becomes of a clip."""


def clip_of(text: str) -> tuple[Path | None, Clip]:
    """The clip that a command line names, as 1280x720x81, a video file or a folder of frames, and its file."""
    if match := CLIP_SIZE.fullmatch(text.strip()):
        width, height, frames = map(int, match.groups())
        if min(width, height, frames) < 1:
            raise KohyaBucketError(f"{text} is not a clip: width, height and frames must be 1 or more")
        return None, Clip((width, height), frames)
    scan = read_clips([text], workers=1)
    if scan.failures:
        raise KohyaBucketError(f"{text} cannot be read as a clip: {scan.failures[0][2]}")
    width, height = scan.sizes[0].tolist()
    facts = float(scan.fps[0]), int(scan.rotation[0]), bool(scan.counted[0])
    return Path(text), Clip((width, height), int(scan.frames[0]), *facts)


def ways_to_train(
    context: typer.Context, config: Path | None, options: RuleArguments, how: ClipOptions, clip: Clip | None
) -> list[WayToTrain]:
    """Each way to train a clip, or with --arch or a config of musubi-tuner an image."""
    own = [field.name for field in fields(how) if field.name != "arch"]
    if clip is None and (beside := given(context, own)):
        raise ConfigError(f"{' and '.join(beside)}: for clips, and this is an image")
    if how.target_frames is None and how.frame_extraction != "full":
        refuse_beside(context, "without --target-frames, all frames are taken", ["frame_extraction"])
    if config is not None:
        return _of_config(context, config, how, clip, own)
    if how.arch is not None:
        others = [name for name in options.fields if name not in ("resolution", "bucket_no_upscale")]
        refuse_beside(context, "--arch places as musubi-tuner does", others)
        resolution = options.size if given(context, ["resolution"]) else (960, 544)
        model = architecture_named(how.arch)
        no_upscale = options.bucket_no_upscale
        keys: CommonKeys = ImageKeys(resolution, enable_bucket=True, bucket_no_upscale=no_upscale)
        keys = keys if clip is None else how.clip_keys(resolution, no_upscale)
        return [_way(f"{resolution[0]}x{resolution[1]} for {model.title}", keys, model, clip)]
    if clip is None or how.source_fps is not None:
        raise ConfigError("--source-fps: name the model whose rate it is brought to, e.g. --arch wan")
    of_clip, picture = how.clip_keys(options.size), options.make()
    rule = ClipBuckets(
        picture, of_clip.target_frames, extraction=of_clip.frame_extraction, max_frames=of_clip.max_frames
    )
    return [(options.title, picture, TakenClip(clip, rule, None))]


def _of_config(
    context: typer.Context, config: Path, how: ClipOptions, clip: Clip | None, own: list[str]
) -> list[WayToTrain]:
    if trainer_of(config) != MUSUBI_TUNER:
        raise ConfigError(f"{config} is not a config of musubi-tuner, the only trainer here that trains clips")
    refuse_beside(context, f"--config {config} brings its own rules", own)
    out, read = [], musubi_config(config, how.arch)
    for number, keys in enumerate(read.datasets, 1):
        if isinstance(keys, ClipKeys) is (clip is not None):
            width, height = keys.resolution
            name = f"dataset {number} ({width}x{height} for {read.model.title})"
            out.append(_way(name, keys, read.model, clip))
    if not out:
        raise ConfigError(f"{config}: none of its datasets is of {'images' if clip is None else 'clips'}")
    return out


def _way(name: str, keys: CommonKeys, model: Family, clip: Clip | None) -> WayToTrain:
    taken = None
    if clip is not None and isinstance(keys, ClipKeys):
        taken = TakenClip(clip, keys.clip_rule(model), keys.source_fps)
    return name, keys.picture_rule(model), taken


@dataclass(frozen=True)
class TakenClip:
    """What becomes of a clip by one rule."""

    clip: Clip
    rule: ClipBuckets
    source_fps: float | None

    @cached_property
    def told(self) -> dict[str, Any]:
        """As plain values; `items` are (first frame, frames)."""
        clip = self.clip
        rate = (clip.fps or self.rule.target_fps) if self.rule.by_time else self.source_fps
        placed = self.rule.place([clip.size], [clip.frames], rate)
        frames, kept = int(placed.frames[0]), int(placed.kept[0])
        seconds = clip.frames / clip.fps if clip.fps else None
        spans = placed.spans
        return {
            "frames_in_file": clip.frames,
            "fps": clip.fps or None,
            "counted": clip.counted,
            "rotation": clip.rotation,
            "frames": frames,
            "items": [list(item) for item in zip(spans.start.tolist(), spans.length.tolist(), strict=True)],
            "buckets": placed.buckets.tolist(),
            "kept": kept,
            "dropped": frames - kept,
            "seconds_lost": None if seconds is None else seconds * (1 - kept / max(frames, 1)),
            "reason": "" if placed.placed[0] else placed.reason(0).text,
        }

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) for a reader."""
        clip, told, target = self.clip, self.told, self.rule.target_fps
        how = ", counted by decoding" if clip.counted else ""
        rate = f" at {clip.fps:.5g} per second, {clip.frames / clip.fps:.2f} s" if clip.fps else ""
        lines = [("frames", f"{clip.frames:,}{rate}{how}")]
        if clip.rotation:
            text = f"a player turns it by {clip.rotation} degrees; training takes it as it is stored"
            lines.append(("rotation", text))
        if self.source_fps is not None and target is not None:
            lines.append(("rate", f"{self.source_fps:g} to {target:g} per second: {counted(told['frames'], 'frame')}"))
        if not told["items"]:
            return [*lines, ("items", f"none: {told['reason']}")]
        shown = [f"{length} from {start}" for start, length in told["items"]]
        buckets = ", ".join("x".join(map(str, bucket)) for bucket in told["buckets"])
        lines.append(("items", f"{len(shown):,} in {buckets}: frames {some(shown, _SHOWN)}"))
        lost = "" if told["seconds_lost"] is None else f" ({told['seconds_lost']:.2f} s)"
        lines.append(("kept", f"{told['kept']:,} of {told['frames']:,} frames; {told['dropped']:,} in no item{lost}"))
        return lines
