"""`kohya-bucket patch install|status|remove DIR`: the permanent hook in an sd-scripts checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.console import say

if TYPE_CHECKING:
    from kohya_bucket.adapter.marked_block import PatchStatus
    from kohya_bucket.sdscripts.probe import Trial

Checkout = Annotated[Path, typer.Argument(metavar="DIR", help="the sd-scripts checkout, or a kohya_ss GUI folder")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True)
    app.add_typer(group, name="patch")
    group.command("install")(_install)
    group.command("status")(_status)
    group.command("remove")(_remove)


def _install(folder: Checkout) -> None:
    """Write the marked block into library/__init__.py, once the adapter was tried there."""
    from kohya_bucket.sdscripts.checkout import CheckoutError, find_checkout
    from kohya_bucket.sdscripts.patch import patch_install
    from kohya_bucket.sdscripts.probe import try_adapter

    root = find_checkout(folder)
    say(f"testing the adapter in {root} …", err=True)
    trial = try_adapter(root)
    if trial.refused:
        raise CheckoutError(f"{trial.refused}. The block was not written: update kohya-bucket, or train without it")
    _print(patch_install(folder))
    _print_trial(trial)


def _status(folder: Checkout) -> None:
    """Say whether the block is there, and what the adapter does in this checkout."""
    from kohya_bucket.sdscripts.checkout import find_checkout
    from kohya_bucket.sdscripts.patch import patch_status
    from kohya_bucket.sdscripts.probe import try_adapter

    _print(patch_status(folder))
    _print_trial(try_adapter(find_checkout(folder)))


def _remove(folder: Checkout) -> None:
    """Take the block out; the file is then what it was."""
    from kohya_bucket.sdscripts.patch import patch_remove

    _print(patch_remove(folder))


def _print(status: PatchStatus) -> None:
    state = "not installed"
    if status.installed:
        state = "installed" if status.current else "installed by another version"
    say(f"{status.file}: {state}")


def _print_trial(trial: Trial) -> None:
    if trial.active:
        say("this checkout is a known version: after patching, every training started from it uses kohya_bucket")
    elif trial.refused:
        say(f"this checkout is not a known version, and after patching no training would start: {trial.refused}")
    else:
        say(
            f"the adapter could not be tested with this Python ({sys.executable}): {trial.error or 'no answer'}. Ask "
            "again in the environment that trains"
        )
    for subject, why in trial.left_alone.items():
        say(f"{subject} is left to sd-scripts: {why}")
