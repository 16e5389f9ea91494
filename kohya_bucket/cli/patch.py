"""`kohya-bucket patch install|status|remove DIR`: the permanent hook in an sd-scripts checkout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Checkout = Annotated[Path, typer.Argument(metavar="DIR", help="the sd-scripts checkout, or a kohya_ss GUI folder")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Put the adapter into an sd-scripts checkout for good, or take it out.", no_args_is_help=True
    )
    app.add_typer(group, name="patch")

    def command(name: str, action: str) -> Callable[[Path], None]:
        from kohya_bucket.sdscripts import patch

        def run(folder: Checkout) -> None:
            status: patch.PatchStatus = getattr(patch, f"patch_{name}")(folder)
            state = (
                "installed"
                if status.current
                else "installed by another version"
                if status.installed
                else "not installed"
            )
            typer.echo(f"{status.file}: {state}")

        run.__doc__ = action
        return run

    group.command("install")(command("install", "Write the marked block into library/__init__.py."))
    group.command("status")(command("status", "Say whether the block is there."))
    group.command("remove")(command("remove", "Take the block out; the file is then what it was."))
