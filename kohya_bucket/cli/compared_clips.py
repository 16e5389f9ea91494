"""What `compare` does with clips: by the rules of musubi-tuner, and by those of other trainers for the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kohya_bucket.adapter.findings import Severity
from kohya_bucket.buckets.clip_trainers import CLIP_TRAINERS, ClipModel
from kohya_bucket.checks import one_of
from kohya_bucket.cli.configs import is_musubi_config
from kohya_bucket.cli.given import given, refuse_beside
from kohya_bucket.cli.progress import scan_progress
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images.clips import ClipScan, list_clips, read_clips
from kohya_bucket.musubi.architectures import architecture_named
from kohya_bucket.musubi.config import ClipKeys, read_config
from kohya_bucket.musubi.listing import list_items
from kohya_bucket.musubi.rules import ANY, clip_rule, rates_of
from kohya_bucket.reports.compare import PlacedClips
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    import numpy.typing as npt
    import typer

    from kohya_bucket.cli.clip_simulation import ClipOptions
    from kohya_bucket.cli.rule_options import RuleOptions
    from kohya_bucket.musubi.architectures import Architecture

__all__ = ["ComparedSet", "clip_rules", "sets_of"]

_OWN = "musubi-tuner"


@dataclass(frozen=True)
class ComparedSet:
    """Clips that are trained alike.

    Attributes:
        title: for a reader.
        scan: what is known of each.
        keys: how musubi-tuner trains them.
        model: as far as it is known.
        given_rates: `source_fps` is not stated: it is each clip's own.
    """

    title: str
    scan: ClipScan
    keys: ClipKeys
    model: Architecture
    given_rates: bool = False

    def placed(self, names: list[str]) -> list[PlacedClips]:
        """By each of the rules."""
        return [self._placed(name) for name in names]

    def _placed(self, name: str) -> PlacedClips:
        scan, keys, model = self.scan, self.keys, self.model
        if name == _OWN:
            own = clip_rule(keys, model)
            fps: npt.ArrayLike | None = rates_of(keys, model, scan.fps)
            if self.given_rates and own.target_fps is not None:
                fps = np.where(scan.fps > 0, scan.fps, own.target_fps)
            return PlacedClips(name, own.place(scan.sizes, scan.frames, fps))
        lengths = keys.target_frames
        if keys.frame_extraction == "full":
            lengths = tuple(range(model.grid.base, keys.max_frames + 1, model.grid.stride))
        wanted = ClipModel(keys.resolution, lengths, model.grid, model.target_fps, model.steps)
        rule = CLIP_TRAINERS[name](wanted)
        return PlacedClips(name, rule.place(scan.sizes, scan.frames, scan.fps), rule.spread)


def clip_rules(rules: str | None) -> list[str]:
    """Names of rules for clips from `musubi-tuner,open-sora`; all of them from `trainers`, `all` or None.

    Raises:
        ConfigError: a name that is none.
    """
    known = [_OWN, *CLIP_TRAINERS]
    groups = {"all": known, "trainers": known}
    parts = [part.strip() for part in (rules or "all").split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"--rules is {rules!r}, but must be names separated by commas: {', '.join(known)}")
    names = [name for part in parts for name in groups.get(part, [part])]
    return [one_of("rule for clips", name, known, ConfigError) for name in dict.fromkeys(names)]


def sets_of(context: typer.Context, sources: list[str], options: RuleOptions, how: ClipOptions, recursive: bool,
            workers: int | None, quiet: bool) -> list[ComparedSet]:  # fmt: skip
    """The clips that a command line names: those of a musubi-tuner config by data set, or all together.

    Raises:
        KohyaBucketError: there are none, none can be read, what reads them is not installed, or options do not fit.
    """
    config = Path(sources[0])
    if len(sources) == 1 and config.suffix.lower() == ".toml" and config.is_file() and is_musubi_config(config):
        beside = [*options.fields, "target_frames", "frame_extraction"]
        refuse_beside(context, f"{config} brings its own rules", beside)
        return _of_config(config, how.arch, workers, quiet)
    model = None if how.arch is None else architecture_named(how.arch)
    size = options.size if given(context, ["resolution"]) else ClipKeys.resolution
    keys = how.keys(size, False, clip=True)
    assert isinstance(keys, ClipKeys)
    source = ", ".join(sources)
    paths = list_clips(sources, recursive=recursive)
    if not paths:
        raise KohyaBucketError(f"{source}: no clips found there")
    scan = _read(paths, source, workers, quiet)
    return [ComparedSet(_title(scan, source, keys, model), scan, keys, model or ANY, given_rates=True)]


def _of_config(path: Path, arch: str | None, workers: int | None, quiet: bool) -> list[ComparedSet]:
    """The data sets of clips of a musubi-tuner config.

    Raises:
        KohyaBucketError: the config has a mistake or no clips, or they cannot be read.
    """
    read = read_config(path, None if arch is None else architecture_named(arch))
    if wrong := read.findings.of(Severity.ERROR):
        raise ConfigError(f"{path}: {wrong[0].text}")
    out = []
    for number, (keys, place) in enumerate(zip(read.datasets, read.places, strict=True), 1):
        if isinstance(keys, ClipKeys) and (paths := list_items(keys, place, read.findings, read.architecture).paths):
            scan = _read(paths, f"{path}, dataset {number}", workers, quiet)
            title = _title(scan, f"{path}, dataset {number}", keys, read.architecture)
            out.append(ComparedSet(title, scan, keys, read.architecture or ANY))
    if not out:
        raise ConfigError(f"{path}: none of its data sets has clips; `compare` takes folders of images, not configs")
    return out


def _read(paths: Sequence[str], source: str, workers: int | None, quiet: bool) -> ClipScan:
    with scan_progress("reading clips", quiet=quiet) as progress:
        scan = read_clips(paths, workers=workers, progress=progress)
    if not (scan.frames > 0).any():
        raise KohyaBucketError(f"{source}: none of {counted(len(paths), 'clip')} can be read: {scan.failures[0][2]}")
    return scan


def _title(scan: ClipScan, source: str, keys: ClipKeys, model: Architecture | None) -> str:
    broken = f" ({len(scan.failures):,} unreadable left out)" if scan.failures else ""
    width, height = keys.resolution
    rate = "as in the file" if model is None or model.target_fps is None else f"{model.target_fps:g} per second"
    whose = "any model" if model is None else model.title
    readable = counted(len(scan) - len(scan.failures), "clip")
    return f"{readable} of {source}{broken}, {width}x{height} for {whose}, frames {rate}"
