"""Clips on a command line, and what is taken of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from kohya_bucket.buckets.choices import listed
from kohya_bucket.buckets.clips import ClipBuckets
from kohya_bucket.cli.options import CLIP_SIZE, ClipOptions, RuleArguments, given, refuse_beside
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images.clips import read_clips
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.face import Asked, OneItem, Way
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.registry import trainer_for, trainer_of_model, trainers

_SHOWN = 6
_MOST_FRAMES = 129  # of a clip of which all are taken


@dataclass(frozen=True)
class Clip:
    """One clip; `fps` is 0 where it is not known, `counted` where a container does not say how many frames it has.

    `flaw` is what is wrong with the file, for a reader.
    """

    size: tuple[int, int]
    frames: int
    fps: float = 0.0
    rotation: int = 0
    counted: bool = False
    flaw: str = ""


def clip_of(text: str) -> tuple[Path | None, Clip]:
    """The clip that a command line names, as 1280x720x81, a video file or a folder of frames, and its file."""
    if match := CLIP_SIZE.fullmatch(text.strip()):
        width, height, frames = map(int, match.groups())
        if min(width, height, frames) < 1:
            raise KohyaBucketError(f"{text} is not a clip: width, height and frames must be 1 or more")
        return None, Clip((width, height), frames)
    scan = read_clips([text], first=True, workers=1)
    if scan.failures:
        raise KohyaBucketError(f"{text} cannot be read as a clip: {scan.failures[0][2]}")
    width, height = scan.sizes[0].tolist()
    facts = float(scan.fps[0]), int(scan.rotation[0]), bool(scan.counted[0]), scan.flaws.get(0, "")
    return Path(text), Clip((width, height), int(scan.frames[0]), *facts)


def ways_to_train(
    context: typer.Context, asked: Asked, options: RuleArguments, how: ClipOptions, item: OneItem, focus: str | None
) -> tuple[list[Way], AdapterOptions]:
    """Each way to train a clip, or an image with a model or config of a trainer that trains clips, and the options."""
    about_clips = [field.name for field in fields(how) if field.name != "arch"]
    if not item.is_clip and (beside := given(context, about_clips)):
        raise ConfigError(f"{' and '.join(beside)}: for clips, and this is an image")
    if asked.config is not None:
        trainer = trainer_for("simulate", asked.config)
        if not trainer.takes_clips:
            able = listed([one.name for one in trainers() if one.takes_clips], "or")
            raise ConfigError(f"{asked.config} is not a config of {able}, the only trainer here that trains clips")
        refuse_beside(context, f"--config {asked.config} brings its own rules", about_clips)
        return trainer.ways(asked, item, focus)
    if how.arch is not None:
        trainer = trainer_of_model(how.arch)
        others = [name for name in options.fields if name not in ("resolution", "bucket_no_upscale")]
        refuse_beside(context, f"--arch places as {trainer.name} does", others)
        keys: dict[str, Any] = {
            "resolution": options.size if given(context, ["resolution"]) else None,
            "bucket_no_upscale": options.bucket_no_upscale,
        }
        return trainer.ways(replace(asked, arguments=keys | (how.keys() if item.is_clip else {})), item, focus)
    if not item.is_clip or how.source_fps is not None:
        raise ConfigError("--source-fps: name the model whose rate it is brought to, e.g. --arch wan")
    lengths, picture = how.lengths(), options.make()
    extraction = "full" if lengths is None else "head"
    clips = ClipBuckets(picture, lengths or (1,), extraction=extraction, max_frames=_MOST_FRAMES)
    return [Way(options.title, picture, item.size, clips)], AdapterOptions().with_focus(focus)


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
            "flaw": clip.flaw,
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
        if clip.flaw:
            lines.append(("file", clip.flaw))
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
