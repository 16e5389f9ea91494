"""musubi-tuner as the commands see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.face import Asked, OneItem, Trainer, Way
from kohya_bucket.trainers.door.programs import Programs

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.door import TrainerDoor
    from kohya_bucket.trainers.door.file_findings import Section
    from kohya_bucket.trainers.door.findings import Finding, Teller
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.door.plan import Plan
    from kohya_bucket.trainers.door.subject import HeaderReader, Subject
    from kohya_bucket.trainers.musubi.architectures import Family
    from kohya_bucket.trainers.musubi.config import MusubiConfig
    from kohya_bucket.trainers.musubi.keys import CommonKeys


class MusubiTuner(Trainer):
    """kohya-ss/musubi-tuner."""

    name, package, marks = "musubi-tuner", "musubi_tuner", ("dataset/image_video_dataset.py",)
    commands = ("plan", "analyze", "simulate", "doctor")
    takes_arch = takes_clips = True

    def door(self) -> TrainerDoor:
        from kohya_bucket.trainers.musubi.door import DOOR

        return DOOR

    def starts_with(self, program: Path) -> bool:
        with suppress(ConfigError):
            self.programs(Asked(arch=str(program)))
            return True
        return False

    def models(self) -> Sequence[str]:
        from kohya_bucket.trainers.musubi.families import long_names

        return long_names()

    def programs(self, asked: Asked) -> Programs:
        from kohya_bucket.trainers.musubi.families import architecture_named

        return self._programs(architecture_named(asked.arch))

    def _programs(self, model: Family) -> Programs:
        return Programs(f"{model.title} in {self.name}", {self.name: model.steps})

    def recognises(self, config: Path, content: Any) -> bool:
        from kohya_bucket.trainers.musubi.config import is_musubi

        return is_musubi(content)

    def plan(
        self, asked: Asked, gpus: Sequence[int] | None, accumulate: int | None, images: bool, tell: Teller
    ) -> Plan:
        from kohya_bucket.trainers.musubi.plan import plan_of

        read = _read(asked)
        with tell.progress("reading images and clips") as progress:
            return plan_of(read, gpus or [1], accumulate or 1, images, progress)

    def examine(self, asked: Asked, tell: Teller, quick: bool) -> Iterator[Section]:
        from kohya_bucket.trainers.door.environment import packages_section
        from kohya_bucket.trainers.musubi.plan import config_section

        read = _read(asked)
        yield config_section(read, tell.progress, decode=not quick)
        yield packages_section(read.model.full_name)

    def subjects(
        self, asked: Asked, batch_size: int | None, reader: HeaderReader
    ) -> tuple[list[Subject], list[Finding]]:
        from kohya_bucket.trainers.musubi.plan import subjects_of

        read = _read_whole(asked)
        return subjects_of(read, self._programs(read.model), batch_size, reader)

    def ways(self, asked: Asked, item: OneItem, focus: str | None) -> tuple[list[Way], AdapterOptions]:
        from kohya_bucket.trainers.door.findings import Findings, Severity
        from kohya_bucket.trainers.door.options import AdapterOptions, required
        from kohya_bucket.trainers.musubi.config import check_model
        from kohya_bucket.trainers.musubi.families import architecture_named
        from kohya_bucket.trainers.musubi.keys import ClipKeys, dataset_of
        from kohya_bucket.trainers.musubi.refusals import check_options

        options = AdapterOptions()
        if asked.config is None:
            keys, model = dataset_of(asked.arguments, item.is_clip), architecture_named(asked.arch)
            width, height = keys.resolution
            if isinstance(keys, ClipKeys):
                findings = Findings()
                check_model(keys, "", model, findings)
                if errors := findings.of(Severity.ERROR):
                    raise ConfigError(errors[0].text)
            return [_way(f"{width}x{height} for {model.title}", keys, model, item)], options.with_focus(focus)
        ways, read = [], _read_whole(asked)
        for number, keys in enumerate(read.datasets, 1):
            if isinstance(keys, ClipKeys) is item.is_clip:
                width, height = keys.resolution
                ways.append(_way(f"dataset {number} ({width}x{height} for {read.model.title})", keys, read.model, item))
        if not ways:
            raise ConfigError(f"{asked.config}: none of its datasets is of {'clips' if item.is_clip else 'images'}")
        options = required(read.options, read.findings, read.path).with_focus(focus)
        check_options(options)
        return ways, options


TRAINER = MusubiTuner()


def _read(asked: Asked) -> MusubiConfig:
    from kohya_bucket.trainers.musubi.config import read_config
    from kohya_bucket.trainers.musubi.families import architecture_named

    return read_config(asked.file, architecture_named(asked.arch))


def _read_whole(asked: Asked) -> MusubiConfig:
    """The same; `ConfigError` for one with mistakes, or from which nothing follows without a model."""
    from kohya_bucket.trainers.door.findings import Severity
    from kohya_bucket.trainers.musubi.config import NEEDS_MODEL

    read = _read(asked)
    if wrong := [one for one in read.findings if one.severity is Severity.ERROR or one.code == NEEDS_MODEL]:
        raise ConfigError(f"{asked.file}: {wrong[0].text}")
    return read


def _way(name: str, keys: CommonKeys, model: Family, item: OneItem) -> Way:
    from kohya_bucket.trainers.musubi.keys import ClipKeys

    clips = keys.clip_rule(model) if isinstance(keys, ClipKeys) else None
    return Way(name, keys.picture_rule(model), item.size, clips, getattr(keys, "source_fps", None))
