"""`kohya-bucket version`."""

from __future__ import annotations

import typer

import kohya_bucket


def register(app: typer.Typer) -> None:
    @app.command()
    def version() -> None:
        """Print the version."""
        typer.echo(kohya_bucket.__version__)
