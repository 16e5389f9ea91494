"""Where images and captions are in the sources of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["SourceOptions"]


@dataclass(frozen=True)
class SourceOptions:
    """Where images and captions are in what is named; each field is an option."""

    captions_file: Annotated[
        Path | None, typer.Option(help="A file with one caption per line. Default: what is beside each image.")
    ] = None
    caption_extension: Annotated[
        str,
        typer.Option(help='Ending of caption files, also in tars. In a .json file, the text under "caption" is taken.'),
    ] = ".txt"
    image_column: Annotated[str, typer.Option(help="Of Parquet files and saved data sets: the column of images.")] = (
        "image"
    )
    caption_column: Annotated[str | None, typer.Option(help="Of the same: the column of captions. Default: none.")] = (
        None
    )
