"""For which trainer and version a dataset config is read: as it says, as is asked for, or the checkout at hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import parse_json, parse_toml, read_text

if TYPE_CHECKING:
    from kohya_bucket.trainers.sdscripts.config import Release
    from kohya_bucket.trainers.sdscripts.families import Trainer


def content_of(path: Path) -> Any:
    """What a TOML, JSON or YAML file holds; None where it holds none of these."""
    from kohya_bucket.trainers.ai_toolkit.config import YAML, parse_yaml

    try:
        text, ending = read_text(path), path.suffix.lower()
        return parse_yaml(text) if ending in YAML else parse_json(text) if ending == ".json" else parse_toml(text)
    except (OSError, ValueError):
        return None


SD_SCRIPTS, MUSUBI_TUNER, AI_TOOLKIT = "sd-scripts", "musubi-tuner", "ai-toolkit"


def trainer_of(config: Path | None) -> str:
    """Whose config a file is: sd-scripts' where it looks like no other trainer's, or there is none."""
    from kohya_bucket.trainers.ai_toolkit.config import YAML, is_job
    from kohya_bucket.trainers.musubi.config import is_musubi

    data = None if config is None else content_of(config)
    yaml = config is not None and config.suffix.lower() in YAML  # no other trainer's, and its mistakes are to be said
    return AI_TOOLKIT if yaml or is_job(data) else MUSUBI_TUNER if is_musubi(data) else SD_SCRIPTS


_VERSION = re.compile(r"v?\d+(\.\w+)*|main")


def release_at_hand(given: str | None) -> tuple[Release, Path | None]:
    """The version or checkout that `--sd-scripts` names; by default the checkout at hand, or else the newest version.

    Returns:
        the version; the checkout, where it is one.
    """
    from kohya_bucket.trainers.sdscripts.config import NEWEST, Release
    from kohya_bucket.trainers.sdscripts.families import NEEDED, is_too_old, is_version

    if given is not None and _VERSION.fullmatch(given):
        if is_version(given) and is_too_old(given):
            raise ConfigError(f"--sd-scripts is {given!r}: {NEEDED}")
        return Release.of(given), None
    found = checkout_named("--sd-scripts", given)
    return (Release.in_checkout(found), found) if found else (NEWEST, None)


def checkout_named(option: str, given: str | None) -> Path | None:
    """The checkout in the folder that an option names; by default the one at hand, if there is one."""
    from kohya_bucket.trainers.sdscripts.checkout import CheckoutError, find_checkout, nearby_checkout

    if not given:
        return nearby_checkout()
    try:
        return find_checkout(Path(given))
    except CheckoutError as error:
        raise ConfigError(
            f"{option} is {given!r}, but must be a version such as 0.11.1, or a checkout: {error}"
        ) from error


def trainer_at_hand(arch: str | None, checkout: Path | None, config: Path | None = None) -> Trainer:
    """The trainers that `--arch`, a family or a trainer's file, names, or all of them.

    Args:
        checkout: the sd-scripts whose trainers say which steps they accept.
        config: what is trained; where it cannot be read, it is unknown whose models `arch` names.
    """
    from kohya_bucket.trainers.door.config_source import load_source
    from kohya_bucket.trainers.sdscripts.checkout import steps_in
    from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, trainer_named

    try:
        trainer = ANY_TRAINER if arch is None else trainer_named(arch)
    except ConfigError:
        if config is not None:
            load_source(config, "sd-scripts")
        raise
    return trainer if checkout is None else trainer.as_in(steps_in(checkout))
