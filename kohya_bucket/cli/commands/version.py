"""`kohya-bucket version`."""

from __future__ import annotations

import typer

from kohya_bucket._version import __version__


def register(app: typer.Typer) -> None:
    app.command()(version)


def version() -> None:
    typer.echo(__version__)
