"""For which trainer a command checks and advises: what `--arch` names, with the steps of the checkout at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kohya_bucket.latents.architectures import Trainer

__all__ = ["Arch", "trainer_at_hand"]

Arch = Annotated[
    str | None,
    typer.Option(
        "--arch", help="What is trained: sd, sdxl, flux, …, or a trainer (flux_train.py); a GUI's preset tells."
    ),
]


def trainer_at_hand(arch: str | None, checkout: Path | None, config: Path | None = None) -> Trainer:
    """The trainers that `--arch` names, or all of them.

    Args:
        arch: a family, or a trainer's file.
        checkout: the sd-scripts whose trainers say which steps they accept.
        config: what is trained; where it cannot be read, nobody knows whose models `arch` is of.

    Raises:
        ConfigError: it names none, or the config cannot be read.
    """
    from kohya_bucket.adapter.config_source import load_source
    from kohya_bucket.errors import ConfigError
    from kohya_bucket.latents.architectures import ANY_TRAINER, trainer_named
    from kohya_bucket.sdscripts.checkout import steps_in

    try:
        trainer = ANY_TRAINER if arch is None else trainer_named(arch)
    except ConfigError:
        if config is not None:
            load_source(config)
        raise
    return trainer if checkout is None else trainer.as_in(steps_in(checkout))
