"""Options that several commands have, spelled and explained once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

__all__ = ["AsJson", "Quiet", "Recursive", "Sources", "TableOrSources", "Workers", "path"]

Sources = Annotated[list[str], typer.Argument(help="Folders, files, patterns, lists, tar shards.")]
TableOrSources = Annotated[list[str], typer.Argument(help="Folders, files, lists, tar shards, or one table of sizes.")]
Recursive = Annotated[bool, typer.Option(help="Look into subfolders.")]
Workers = Annotated[int | None, typer.Option(min=1, help="At most this many threads or processes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


def path(text: str) -> Path:
    """A folder, or an address in object storage, which is used like one; the function's name is what help shows."""
    from kohya_bucket.latents.remote.remote_path import as_given

    return cast("Path", as_given(text))
