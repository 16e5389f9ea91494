"""Every trainer that is there, and whose config a file is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import kohya_bucket.trainers
from kohya_bucket.buckets.choices import listed
from kohya_bucket.checks import near_text
from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.face import Asked, Trainer


def trainers() -> Sequence[Trainer]:
    """Those of all folders beside this one that have a file `trainer.py`; the one that takes any config is last."""
    return _trainers_in(tuple(kohya_bucket.trainers.__path__))


@cache
def _trainers_in(rooms: tuple[str, ...]) -> Sequence[Trainer]:
    folders = sorted({file.parent.name for room in rooms for file in Path(room).glob("*/trainer.py")})
    every: list[Trainer] = [import_module(f"kohya_bucket.trainers.{name}.trainer").TRAINER for name in folders]
    return sorted(every, key=lambda trainer: trainer.takes_any)


def usual_trainer() -> Trainer:
    """The one that commands without a config are about, and whose configs look like no other's."""
    return trainers()[-1]


def trainer_of(config: Path | None) -> Trainer:
    """Whose config a file is: the usual trainer's where no other recognises it, or there is none."""
    if config is None:
        return usual_trainer()
    from kohya_bucket.trainers.door.config_source import content_of

    content = content_of(config)
    return next((trainer for trainer in trainers() if trainer.recognises(config, content)), usual_trainer())


def trainer_for(command: str, config: Path | None) -> Trainer:
    """The same; `ConfigError` where `command` does not take that trainer's configs."""
    trainer = trainer_of(config)
    if command not in trainer.commands:
        takers = listed([one.name for one in trainers() if command in one.commands])
        others = f"{listed(trainer.commands)} take this one" if trainer.commands else "no command takes this one"
        raise ConfigError(f"{config} is a config of {trainer.name}, and {command} takes those of {takers}; {others}")
    return trainer


def trainer_of_model(arch: str) -> Trainer:
    """The trainer, other than the usual one, that trains a model; `ConfigError` where none does, with all that are."""
    for trainer in trainers()[:-1]:
        with suppress(ConfigError):
            if trainer.models() and trainer.programs(Asked(arch=arch)):
                return trainer
    able = [trainer for trainer in reversed(trainers()) if trainer.models()]
    models_by_trainer = [f"{trainer.name} ({', '.join(trainer.models())})" for trainer in able]
    near = near_text(arch, [model for trainer in able for model in trainer.models()])
    raise ConfigError(f"--arch is {arch!r}, but must be a family of {listed(models_by_trainer, 'or')}{near}")
