"""sd-scripts as the commands see it: also the GUI's presets, its own settings, and folders without a config."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.extras import argument
from kohya_bucket.trainers.door.face import Asked, OneItem, Trainer, Way
from kohya_bucket.trainers.door.programs import Programs

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.cache_files import CacheFiles, ConfigLatents
    from kohya_bucket.trainers.door.door import TrainerDoor
    from kohya_bucket.trainers.door.file_findings import Section
    from kohya_bucket.trainers.door.findings import Finding, Teller
    from kohya_bucket.trainers.door.options import AdapterOptions
    from kohya_bucket.trainers.door.plan import Plan
    from kohya_bucket.trainers.door.subject import Explored, HeaderReader, Subject
    from kohya_bucket.trainers.sdscripts.config import Config, Release
    from kohya_bucket.trainers.sdscripts.families import Family

_VERSION = re.compile(r"v?\d+(\.\w+)*|main")
_HARMLESS = ("missing-folder", "no-images", "cache-conflict")
"""Codes of mistakes that decide no bucket."""


class SdScripts(Trainer):
    """kohya-ss/sd-scripts."""

    name, package, marks = "sd-scripts", "library", ("../train_network.py", "__init__.py")
    commands = ("plan", "analyze", "simulate", "doctor", "explore", "precompute")
    takes_any = True

    def door(self) -> TrainerDoor:
        from kohya_bucket.trainers.sdscripts.door import DOOR

        return DOOR

    def starts_with(self, program: Path) -> bool:
        from kohya_bucket.trainers.sdscripts.checkout import has_patch
        from kohya_bucket.trainers.sdscripts.families import trainer_named

        with suppress(ConfigError):
            trainer_named(program.name)
            return not any(has_patch(folder) for folder in program.resolve().parents[:3])
        return False

    def models(self) -> Sequence[str]:
        from kohya_bucket.buckets.families import FAMILIES

        return list(FAMILIES)

    def endings(self) -> Collection[str]:
        from kohya_bucket.trainers.sdscripts.dataset_images import supported_extensions

        return supported_extensions()

    def programs(self, asked: Asked) -> Programs:
        return programs_at_hand(asked.arch, release_at_hand(asked.version)[1])

    def cached_families(self) -> Mapping[str, Family]:
        from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES

        return ARCHITECTURES

    def cache_files(self) -> CacheFiles:
        from kohya_bucket.trainers.door.cache_files import CacheFiles
        from kohya_bucket.trainers.sdscripts.npz import exchange, files

        return CacheFiles(
            _npz_version, files.check_npz, files.check_family, files.NpzFiles,
            exchange.import_npz, exchange.export_npz, _end_with_captions,
        )  # fmt: skip

    def plan(
        self, asked: Asked, gpus: Sequence[int] | None, accumulate: int | None, images: bool, tell: Teller
    ) -> Plan:
        from kohya_bucket.trainers.sdscripts.plan import plan_of

        read = _read(asked)
        hint, config = "", asked.config
        if config is not None and not config.is_dir() and read.length is None:
            hint = f"give it to the trainer as --dataset_config {argument(config)}, not as --config_file"
        with tell.progress("reading image headers") as progress:
            return plan_of(read, gpus, accumulate, images, hint, progress)

    def examine(self, asked: Asked, tell: Teller, quick: bool) -> Iterator[Section]:
        from kohya_bucket.trainers.door.environment import packages_section
        from kohya_bucket.trainers.sdscripts.cache_doctor import cache_section
        from kohya_bucket.trainers.sdscripts.doctor import checkout_section, config_section

        release, checkout = release_at_hand(asked.version)
        programs = programs_at_hand(asked.arch, checkout, asked.config)
        if asked.config is not None:
            section, examined = config_section(
                asked.config, asked.arguments, release, tell.progress, programs=programs, decode=not quick
            )
            yield section
            if examined is not None:
                yield cache_section(examined, checkout)
        if checkout is not None:
            if not quick:
                tell.say("importing sd-scripts in a process of its own …")
            yield checkout_section(checkout, imported=not quick)
        yield packages_section(programs.family)

    def subjects(
        self, asked: Asked, batch_size: int | None, reader: HeaderReader
    ) -> tuple[list[Subject], list[Finding]]:
        from kohya_bucket.trainers.sdscripts.subjects import subjects_of

        return subjects_of(asked.file, _read(asked), batch_size, reader)

    def ways(self, asked: Asked, item: OneItem, focus: str | None) -> tuple[list[Way], AdapterOptions]:
        from kohya_bucket.buckets.rules.registry import named_rule
        from kohya_bucket.trainers.door.dataset_keys import at_resolutions, rule_for
        from kohya_bucket.trainers.door.findings import Severity
        from kohya_bucket.trainers.door.options import required
        from kohya_bucket.trainers.sdscripts.config.model import refuse_lost_focus
        from kohya_bucket.trainers.sdscripts.dataset_images import skipped_images

        config, read = asked.file, _read(asked, check_captions=False)
        if wrong := [f for f in read.findings if f.severity is Severity.ERROR and f.code not in _HARMLESS]:
            raise ConfigError(
                f"{config}: {wrong[0].text}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
            )
        options = required(read.options, read.findings, read.path)
        if named_rule(options.rule).from_images:
            instead = f"`kohya-bucket plan {argument(config)} --images` shows them"
            raise ConfigError(f"{config}: rule {options.rule!r} depends on all images; {instead}")
        ways = []
        for number, dataset in enumerate(read.datasets, 1):
            skipped = skipped_images([str(config)], [item.size], dataset.config.skip_image_resolution).reasons.get(0)
            but = f", which does not train it ({skipped})" if skipped else ""
            for keys in at_resolutions(dataset.config.dataset_keys, options):
                width, height = keys.resolution
                ways.append(Way(f"dataset {number} ({width}x{height}){but}", rule_for(keys, options), item.size))
        options = options.with_focus(focus)
        for dataset in read.datasets:
            refuse_lost_focus(dataset.config, options, read.release)
        return ways, options

    def explored(self, asked: Asked, reader: HeaderReader) -> Explored:
        from kohya_bucket.trainers.sdscripts.subjects import explored

        return explored(asked.file, _read(asked), reader)

    def latents(self, asked: Asked) -> ConfigLatents:
        from kohya_bucket.trainers.door.cache_files import ConfigLatents
        from kohya_bucket.trainers.door.findings import Severity
        from kohya_bucket.trainers.door.options import required
        from kohya_bucket.trainers.sdscripts.wanted_latents import wanted_by_config

        read = _read(asked)
        if errors := read.findings.of(Severity.ERROR):
            everything = f"`kohya-bucket plan {argument(asked.file)}` lists everything"
            raise ConfigError(f"{asked.file}: {errors[0]}; {everything}")
        options, datasets = required(read.options, read.findings, read.path), read.datasets
        return ConfigLatents(
            options, [one.images.paths for one in datasets], [one.config.batch_size for one in datasets],
            partial(wanted_by_config, read, options=options),
        )  # fmt: skip


TRAINER = SdScripts()


def _read(asked: Asked, check_captions: bool = True) -> Config:
    """A config, a folder of images in its place, or the folders that are named among the arguments."""
    from kohya_bucket.trainers.sdscripts.config import read_config, read_folders, read_images

    release, checkout = release_at_hand(asked.version)
    programs = programs_at_hand(asked.arch, checkout, asked.config)
    if asked.config is not None and asked.config.is_dir():
        return read_images(str(asked.config), asked.arguments, release=release, programs=programs)
    if asked.config is not None:
        return read_config(
            asked.config, asked.arguments, release=release, programs=programs, check_captions=check_captions
        )
    command_line: dict[str, Any] = dict(asked.arguments)
    images, regularization, metadata = (
        command_line.pop(name, None) for name in ("train_data_dir", "reg_data_dir", "in_json")
    )
    if images is None:
        raise KohyaBucketError("name a dataset config, a file for --config_file, a GUI preset, or --train-data-dir")
    return read_folders(images, regularization, command_line, in_json=metadata, release=release, programs=programs)


def _end_with_captions() -> None:
    from kohya_bucket.trainers.sdscripts.caching.text import ahead

    ahead.asked = True


def _npz_version(named: str) -> str:
    from kohya_bucket.trainers.sdscripts.checkout import npz_version
    from kohya_bucket.trainers.sdscripts.families import is_version

    if is_version(named):
        return named
    checkout = checkout_named("--for", named)
    return npz_version(checkout) if checkout else ""


def release_at_hand(named: str | None) -> tuple[Release, Path | None]:
    """The version or checkout that `--sd-scripts` names; by default the checkout at hand, or else the newest version.

    Returns:
        the version; the checkout, where it is one.
    """
    from kohya_bucket.trainers.sdscripts.config import NEWEST, Release
    from kohya_bucket.trainers.sdscripts.families import NEEDED, is_too_old, is_version

    if named is not None and _VERSION.fullmatch(named):
        if is_version(named) and is_too_old(named):
            raise ConfigError(f"--sd-scripts is {named!r}: {NEEDED}")
        return Release.from_version(named), None
    checkout = checkout_named("--sd-scripts", named)
    return (Release.in_checkout(checkout), checkout) if checkout else (NEWEST, None)


def checkout_named(option: str, named: str | None) -> Path | None:
    """The checkout in the folder that an option names; by default the one at hand, if there is one."""
    from kohya_bucket.trainers.sdscripts.checkout import CheckoutError, find_checkout, nearby_checkout

    if not named:
        return nearby_checkout()
    try:
        return find_checkout(Path(named))
    except CheckoutError as error:
        raise ConfigError(
            f"{option} is {named!r}, but must be a version such as 0.11.1, or a checkout: {error}"
        ) from error


def programs_at_hand(arch: str | None, checkout: Path | None, config: Path | None = None) -> Programs:
    """The programs that `--arch`, a family or a program's file, names, or all of them.

    Args:
        checkout: the sd-scripts whose programs say which steps they accept.
        config: what is trained; where it cannot be read, it is unknown whose models `arch` names.
    """
    from kohya_bucket.trainers.door.config_source import load_source
    from kohya_bucket.trainers.sdscripts.checkout import own_programs, steps_in
    from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, trainer_named

    try:
        programs = ANY_TRAINER if arch is None else trainer_named(arch)
    except ConfigError:
        if arch and checkout is not None and (own := own_programs(checkout, arch)):
            return own
        if config is not None:
            load_source(config, "sd-scripts")
        raise
    return programs if checkout is None else programs.as_in(steps_in(checkout))
