"""`kohya-bucket patch install|status|remove DIR`: the permanent hook in a trainer's checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.checks import path_meant
from kohya_bucket.cli.console import say
from kohya_bucket.cli.help import opt
from kohya_bucket.extras import argument

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.checkout_patch import CheckoutPatch, PatchStatus, Trial

_FORCE_HELP = "write the block though the adapter could not be tried"
Checkout = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="the checkout of sd-scripts, musubi-tuner, ai-toolkit or anima_lora, or a kohya_ss GUI folder",
    ),
]
SUBCOMMANDS = "install", "status", "remove"


def install(
    folder: Checkout,
    force: bool = opt(False, _FORCE_HELP, "--force"),
) -> None:
    """Write the marked block into the trainer's package, once the adapter was tried there."""
    from kohya_bucket.trainers.door.checkout_patch import CheckoutError

    patch = _patch_of(folder)
    root = patch.find(folder)
    say(f"testing the adapter in {root} …", err=True)
    trial = patch.attempt(root)
    if trial.refused:
        raise CheckoutError(f"{trial.refused}. The block was not written: update kohya-bucket, or train without it")
    if not (trial.active or force):
        raise CheckoutError(
            f"{_untried(trial)}. The block was not written: install with the Python that trains, "
            f"`python -m kohya_bucket patch install {argument(folder)}`; --force writes it untried"
        )
    _print(patch.install(folder))
    trial = patch.attempt(root)
    _print_trial(patch, trial)
    if not trial.runs_block:
        raise CheckoutError(f"the block is written, but Python does not run it when it imports {patch.file}")


def status(folder: Checkout) -> None:
    """Say whether the block is there, and what the adapter does in this checkout; exit code 1 if it does not run."""
    patch = _patch_of(folder)
    found, trial = patch.status(folder), patch.attempt(patch.find(folder))
    _print(found)
    _print_trial(patch, trial, _INSTALLED if found.installed else _WITH_BLOCK.format(argument(folder)))
    if found.installed and (found.stale or not trial.runs_block):
        why = f"runs {found.stale}, unchecked and from another state" if found.stale else "does not run the block"
        say(f"but Python {why} when it imports this file: trainings start WITHOUT kohya_bucket. Run "
            f"`kohya-bucket patch install {argument(folder)}` again")  # fmt: skip
        raise typer.Exit(1)


def remove(folder: Checkout) -> None:
    """Take the block out; the file is then what it was."""
    _print(_patch_of(folder).remove(folder))


def _patch_of(folder: Path) -> CheckoutPatch:
    """That of the trainer whose checkout the folder is."""
    from kohya_bucket.trainers.ai_toolkit.checkout import PATCH as AI_TOOLKIT
    from kohya_bucket.trainers.anima_lora.checkout import PATCH as ANIMA_LORA
    from kohya_bucket.trainers.door.checkout_patch import CheckoutError
    from kohya_bucket.trainers.musubi.checkout import PATCH as MUSUBI_TUNER
    from kohya_bucket.trainers.sdscripts.checkout import PATCH as SD_SCRIPTS
    from kohya_bucket.trainers.sdscripts.checkout import SubmoduleError

    if not folder.exists():
        raise CheckoutError(f"{folder} does not exist: {path_meant(folder)}")
    for patch in (ANIMA_LORA, SD_SCRIPTS, MUSUBI_TUNER, AI_TOOLKIT):
        try:
            patch.find(folder)
            return patch
        except SubmoduleError:
            raise
        except CheckoutError:
            continue
    raise CheckoutError(
        f"{folder} is not a checkout of sd-scripts, which holds library/ beside train_network.py, none of "
        "musubi-tuner, which holds src/musubi_tuner/, none of ai-toolkit, which holds toolkit/ beside run.py, and none "
        "of anima_lora, which holds library/ beside train.py: name the folder that these lie in"
    )


def _print(status: PatchStatus) -> None:
    state = "installed" if status.current else "installed by another version"
    say(f"{status.file}: {state if status.installed else 'not installed'}")


def _untried(trial: Trial) -> str:
    return f"the adapter could not be tested with this Python ({sys.executable}): {trial.error or 'no answer'}"


_INSTALLED = "while the block is installed"
_WITH_BLOCK = "with the block, which `kohya-bucket patch install {}` writes"


def _print_trial(patch: CheckoutPatch, trial: Trial, when: str = _INSTALLED) -> None:
    if trial.active:
        say(f"this checkout is a known version: {when}, every training started from it uses kohya_bucket")
    elif trial.refused:
        say(f"this checkout is not a known version, and with the block no training would start: {trial.refused}")
    else:
        say(f"{_untried(trial)}. Ask again in the environment that trains")
    for subject, why in trial.left_alone.items():
        say(f"{subject} is left to {patch.trainer}: {why}")
