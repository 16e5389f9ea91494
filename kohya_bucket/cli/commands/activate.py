"""`kohya-bucket activate`: the adapter for every training that this Python starts, with no checkout touched."""

from __future__ import annotations

import sys

import typer

from kohya_bucket.cli.console import say
from kohya_bucket.cli.help import opt
from kohya_bucket.errors import KohyaBucketError

_OFF_HELP = "Undo it: take away the files that were written."
_STATUS_HELP = "Say whether it is active; write nothing."


def activate(
    off: bool = opt(False, _OFF_HELP, "--off"),
    status: bool = opt(False, _STATUS_HELP, "--status"),
) -> None:
    """A training of sd-scripts, musubi-tuner, ai-toolkit or anima_lora is recognized when it imports its own package,
    whatever starts it, and no checkout is changed. `KOHYA_BUCKET=0` starts one without the adapter.
    """
    from kohya_bucket.trainers import activation

    folder = activation.site_packages()
    if off and status:
        raise KohyaBucketError("--off changes what --status only looks at: give one of them")
    if off:
        was = activation.activation(folder).active
        activation.deactivate(folder)
        say(f"{'no longer' if was else 'not'} active in {folder}")
        return
    if not status:
        activation.activate(folder)
    state = activation.activation(folder)
    if not state.active:
        say(f"not active in {folder}: `kohya-bucket activate` with {sys.executable} writes two files there")
        raise typer.Exit(1)
    version = "" if state.current else " by another version: activate it again"
    say(f"active in {folder}{version}")
    say(f"every training that {sys.executable} starts uses kohya_bucket, unless KOHYA_BUCKET=0 is set")
