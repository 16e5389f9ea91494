"""What `simulate` says of a clip, and of anything by the rules of musubi-tuner."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kohya_bucket.buckets.choices import EXTRACTIONS, described
from kohya_bucket.cli.given import given, refuse_beside
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.texts import counted, some

if TYPE_CHECKING:
    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.buckets.clips import ClipBuckets
    from kohya_bucket.cli.rule_options import RuleOptions
    from kohya_bucket.musubi.config import DatasetKeys

__all__ = ["Clip", "ClipOptions", "NamedRule", "TakenClip", "clip_of", "musubi_rules"]

_SIZE = re.compile(r"(\d+)\s*[xX×*,]\s*(\d+)\s*[xX×*,@]\s*(\d+)")
_SHOWN = 6


def _extractions() -> str:
    return described({name: choice for name, choice in EXTRACTIONS.items() if name not in ("largest", "full")})


@dataclass(frozen=True)
class ClipOptions:
    """How musubi-tuner takes frames; each field is an option."""

    arch: Annotated[
        str | None, typer.Option(help="As musubi-tuner trains this model: wan, hv, zi, …; with its 960,544 by default.")
    ] = None
    target_frames: Annotated[str | None, typer.Option(help="Of a clip: 1,25,45; else all up to 129.")] = None
    frame_extraction: Annotated[str, typer.Option(help="{}."), partial(_extractions)] = "head"
    source_fps: Annotated[float | None, typer.Option(help="Of a clip: as in musubi-tuner, with --arch.")] = None

    def keys(self, resolution: tuple[int, int], no_upscale: bool, clip: bool) -> DatasetKeys:
        """The same as the keys of a data set. `ConfigError` for lengths that are none."""
        from kohya_bucket.buckets.clips import MOST_FRAMES
        from kohya_bucket.musubi.config import ClipKeys, ImageKeys

        if not clip:
            return ImageKeys(resolution, enable_bucket=True, bucket_no_upscale=no_upscale)
        if self.target_frames is None:
            return ClipKeys(resolution, True, no_upscale, frame_extraction="full", source_fps=self.source_fps)
        try:
            lengths = tuple(int(part) for part in self.target_frames.split(","))
            if max(lengths) > MOST_FRAMES:
                raise ValueError
        except ValueError:
            text = f"--target-frames is {self.target_frames!r}, but must be numbers of frames, e.g. 1,25,45"
            raise ConfigError(text) from None
        how = self.frame_extraction
        return ClipKeys(
            resolution, True, no_upscale, target_frames=lengths, frame_extraction=how, source_fps=self.source_fps
        )


@dataclass(frozen=True)
class Clip:
    """One clip; `fps` is 0 where it is not known, `counted` where a container does not say how many frames it has."""

    size: tuple[int, int]
    frames: int
    fps: float = 0.0
    rotation: int = 0
    counted: bool = False


class NamedRule(NamedTuple):
    """One way to train: where a picture goes, and for clips which frames."""

    name: str
    picture: BucketRule
    clip: ClipBuckets | None = None
    source_fps: float | None = None

    def take(self, clip: Clip | None) -> TakenClip | None:
        """What becomes of a clip; None of an image."""
        return None if clip is None or self.clip is None else TakenClip(clip, self.clip, self.source_fps)


def clip_of(text: str) -> tuple[Path | None, Clip] | None:
    """The clip that a command line names, as 1280x720x81, a video file or a folder of frames; None for an image.

    Raises:
        KohyaBucketError: it cannot be read.
    """
    match = _SIZE.fullmatch(text.strip())
    if match:
        width, height, frames = map(int, match.groups())
        if min(width, height, frames) < 1:
            raise KohyaBucketError(f"{text} is no clip: width, height and frames must be 1 or more")
        return None, Clip((width, height), frames)
    from kohya_bucket.images.formats import is_video

    if not is_video(text) and not Path(text).is_dir():
        return None
    from kohya_bucket.images.clips import read_clips

    scan = read_clips([text], workers=1)
    if scan.failures:
        raise KohyaBucketError(f"{text} cannot be read as a clip: {scan.failures[0][2]}")
    width, height = scan.sizes[0].tolist()
    facts = float(scan.fps[0]), int(scan.rotation[0]), bool(scan.counted[0])
    return Path(text), Clip((width, height), int(scan.frames[0]), *facts)


def musubi_rules(
    context: typer.Context, config: Path | None, options: RuleOptions, how: ClipOptions, clip: Clip | None
) -> list[NamedRule] | None:
    """Each way to train it; None if it is not about musubi-tuner or clips.

    Raises:
        ConfigError: options that do not count here, or a config with nothing of this kind.
    """
    own = [field.name for field in fields(how) if field.name != "arch"]
    if clip is None and (beside := given(context, own)):
        raise ConfigError(f"{' and '.join(beside)}: for clips, and this is an image")
    if how.target_frames is None and how.frame_extraction != "full":
        refuse_beside(context, "without --target-frames, all frames are taken", ["frame_extraction"])
    if config is not None:
        return _of_config(context, config, how, clip is not None, own)
    if clip is None and how.arch is None:
        return None
    from kohya_bucket.buckets.clips import ClipBuckets
    from kohya_bucket.musubi.architectures import architecture_named
    from kohya_bucket.musubi.config import ClipKeys
    from kohya_bucket.musubi.rules import clip_rule, picture_rule

    if how.arch is not None:
        kept = ("resolution", "bucket_no_upscale")
        if beside := given(context, [name for name in options.fields if name not in kept]):
            raise ConfigError(f"--arch places as musubi-tuner does: leave out {' and '.join(beside)}")
        resolution = options.size if given(context, ["resolution"]) else (960, 544)
        architecture = architecture_named(how.arch)
        keys = how.keys(resolution, options.bucket_no_upscale, clip is not None)
        name = f"{resolution[0]}x{resolution[1]} for {architecture.title}"
        rule = clip_rule(keys, architecture) if isinstance(keys, ClipKeys) else None
        return [NamedRule(name, picture_rule(keys, architecture), rule, how.source_fps)]
    if how.source_fps is not None:
        raise ConfigError("--source-fps: name the model whose rate it is brought to, e.g. --arch wan")
    keys, picture = how.keys(options.size, False, True), options.make()
    assert isinstance(keys, ClipKeys)
    rule = ClipBuckets(picture, keys.target_frames, extraction=keys.frame_extraction, max_frames=keys.max_frames)
    width, height = options.size
    name = f"{width}x{height}, {'no upscaling' if options.bucket_no_upscale else options.name}"
    return [NamedRule(name, picture, rule)]


def _of_config(
    context: typer.Context, config: Path, how: ClipOptions, of_clips: bool, own: list[str]
) -> list[NamedRule] | None:
    from kohya_bucket.adapter.findings import Severity
    from kohya_bucket.cli.configs import is_musubi_config
    from kohya_bucket.musubi.architectures import architecture_named
    from kohya_bucket.musubi.config import ClipKeys, read_config
    from kohya_bucket.musubi.rules import ANY, clip_rule, picture_rule

    if not is_musubi_config(config):
        if of_clips or how.arch is not None:
            raise ConfigError(f"{config} is no config of musubi-tuner, the only one here that trains clips")
        return None
    if beside := given(context, own):
        raise ConfigError(f"--config {config} brings its own rules: leave out {' and '.join(beside)}")
    architecture = None if how.arch is None else architecture_named(how.arch)
    read = read_config(config, architecture)
    if wrong := read.findings.of(Severity.ERROR):
        raise ConfigError(f"{config}: {wrong[0].text}")
    out = []
    for number, keys in enumerate(read.datasets, 1):
        if isinstance(keys, ClipKeys) is not of_clips:
            continue
        width, height = keys.resolution
        name = f"dataset {number} ({width}x{height} for {(architecture or ANY).title})"
        picture = picture_rule(keys, architecture)
        if isinstance(keys, ClipKeys):
            out.append(NamedRule(name, picture, clip_rule(keys, architecture), keys.source_fps))
        else:
            out.append(NamedRule(name, picture))
    if not out:
        raise ConfigError(f"{config}: none of its data sets is of {'clips' if of_clips else 'images'}")
    return out


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
