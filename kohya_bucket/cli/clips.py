"""Clips on a command line: what is taken of them by the rules of musubi-tuner, and by those of other trainers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from kohya_bucket.buckets.clips import ClipBuckets, ClipPlacement
from kohya_bucket.buckets.trainers import DiffusionPipeBuckets, DiffusionPipeClips
from kohya_bucket.cli.configs import is_musubi_config, musubi_config
from kohya_bucket.cli.console import scan_progress
from kohya_bucket.cli.options import CLIP_SIZE, ClipOptions, RuleOptions, given, refuse_beside
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images.clips import ClipScan, list_clips, read_clips
from kohya_bucket.musubi.architectures import architecture_named
from kohya_bucket.musubi.keys import ClipKeys, DatasetKeys, ImageKeys
from kohya_bucket.musubi.listing import list_items
from kohya_bucket.texts import counted, some

if TYPE_CHECKING:
    import numpy.typing as npt

    from kohya_bucket.buckets import BucketRule
    from kohya_bucket.musubi.architectures import Architecture


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
            raise KohyaBucketError(f"{text} is no clip: width, height and frames must be 1 or more")
        return None, Clip((width, height), frames)
    scan = read_clips([text], workers=1)
    if scan.failures:
        raise KohyaBucketError(f"{text} cannot be read as a clip: {scan.failures[0][2]}")
    width, height = scan.sizes[0].tolist()
    facts = float(scan.fps[0]), int(scan.rotation[0]), bool(scan.counted[0])
    return Path(text), Clip((width, height), int(scan.frames[0]), *facts)


def ways_to_train(
    context: typer.Context, config: Path | None, options: RuleOptions, how: ClipOptions, clip: Clip | None
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
        keys: DatasetKeys = ImageKeys(resolution, enable_bucket=True, bucket_no_upscale=no_upscale)
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
    if not is_musubi_config(config):
        raise ConfigError(f"{config} is no config of musubi-tuner, the only one here that trains clips")
    refuse_beside(context, f"--config {config} brings its own rules", own)
    out, read = [], musubi_config(config, how.arch)
    for number, keys in enumerate(read.datasets, 1):
        if isinstance(keys, ClipKeys) is (clip is not None):
            width, height = keys.resolution
            name = f"dataset {number} ({width}x{height} for {read.model.title})"
            out.append(_way(name, keys, read.model, clip))
    if not out:
        raise ConfigError(f"{config}: none of its data sets is of {'images' if clip is None else 'clips'}")
    return out


def _way(name: str, keys: DatasetKeys, model: Architecture, clip: Clip | None) -> WayToTrain:
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


_OWN = "musubi-tuner"
CLIP_RULES = [_OWN, "diffusion-pipe"]
"""Names of rules for clips."""


@dataclass(frozen=True)
class ComparedSet:
    """Clips that are trained alike.

    Attributes:
        title: for a reader.
        scan: what is known of each.
        keys: how musubi-tuner trains them.
        model: as far as it is known.
        own_rates: `source_fps` is not stated: it is each clip's own.
    """

    title: str
    scan: ClipScan
    keys: ClipKeys
    model: Architecture
    own_rates: bool

    @classmethod
    def read(
        cls, paths: list[str], source: str, keys: ClipKeys, model: Architecture, workers: int | None, quiet: bool,
        own_rates: bool = False,
    ) -> ComparedSet:  # fmt: skip
        """`KohyaBucketError` if none can be read, or what reads them is not installed."""
        with scan_progress("reading clips", quiet=quiet) as progress:
            scan = read_clips(paths, workers=workers, progress=progress)
        if not (scan.frames > 0).any():
            why = scan.failures[0][2]
            raise KohyaBucketError(f"{source}: none of {counted(len(paths), 'clip')} can be read: {why}")
        broken = f" ({len(scan.failures):,} unreadable left out)" if scan.failures else ""
        width, height = keys.resolution
        rate = "as in the file" if model.target_fps is None else f"{model.target_fps:g} per second"
        readable = counted(len(scan) - len(scan.failures), "clip")
        title = f"{readable} of {source}{broken}, {width}x{height} for {model.title}, frames {rate}"
        return cls(title, scan, keys, model, own_rates)

    def placed(self, name: str) -> ClipPlacement:
        """By one of `CLIP_RULES`."""
        scan, keys, model = self.scan, self.keys, self.model
        if name == _OWN:
            own = keys.clip_rule(model)
            fps: npt.ArrayLike | None = keys.rates(model, scan.fps)
            if self.own_rates and own.target_fps is not None:
                fps = np.where(scan.fps > 0, scan.fps, own.target_fps)
            return own.place(scan.sizes, scan.frames, fps)
        lengths = keys.target_frames
        if keys.frame_extraction == "full":
            lengths = tuple(range(model.grid.base, keys.max_frames + 1, model.grid.stride))
        width, height = keys.resolution
        picture = DiffusionPipeBuckets(round((width * height) ** 0.5), multiple=model.steps)
        return DiffusionPipeClips(picture, lengths, model.target_fps, model.grid).place(
            scan.sizes, scan.frames, scan.fps
        )


def sets_of(context: typer.Context, sources: list[str], options: RuleOptions, how: ClipOptions, recursive: bool,
            workers: int | None, quiet: bool) -> list[ComparedSet]:  # fmt: skip
    """The clips that a command line names: those of a musubi-tuner config by data set, or all together."""
    config = Path(sources[0])
    if len(sources) == 1 and config.suffix.lower() == ".toml" and config.is_file() and is_musubi_config(config):
        beside = [*options.fields, "target_frames", "frame_extraction"]
        refuse_beside(context, f"{config} brings its own rules", beside)
        read = musubi_config(config, how.arch)
        out = []
        for number, (keys, place) in enumerate(zip(read.datasets, read.places, strict=True), 1):
            if isinstance(keys, ClipKeys) and (paths := list_items(keys, place, read.findings, read.model)):
                source = f"{config}, dataset {number}"
                out.append(ComparedSet.read(paths, source, keys, read.model, workers, quiet))
        if not out:
            what = "none of its data sets has clips"
            raise ConfigError(f"{config}: {what}; `compare` takes folders of images, not configs")
        return out
    model = architecture_named(how.arch)
    size = options.size if given(context, ["resolution"]) else ClipKeys.resolution
    keys = how.clip_keys(size)
    source = ", ".join(sources)
    paths = list_clips(sources, recursive=recursive)
    if not paths:
        raise KohyaBucketError(f"{source}: no clips found there")
    return [ComparedSet.read(paths, source, keys, model, workers, quiet, own_rates=True)]
