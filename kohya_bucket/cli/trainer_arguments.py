"""The trainer's command line options that a dataset config falls back to, as options of a command."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

__all__ = ["TrainerArguments"]

_SILENT = "if the config does not set it"


@dataclass(frozen=True)
class TrainerArguments:
    """What sd-scripts' trainer is started with, if the config does not set it; each field is an option."""

    resolution: Annotated[str | None, typer.Option(help="512 or 512,768, if the config does not set it")] = None
    train_batch_size: Annotated[int | None, typer.Option("--train-batch-size", "--batch-size", min=1, help=_SILENT)] = (
        None
    )
    enable_bucket: Annotated[bool, typer.Option("--enable-bucket", help=_SILENT)] = False
    bucket_no_upscale: Annotated[bool, typer.Option("--bucket-no-upscale", help=_SILENT)] = False
    min_bucket_reso: Annotated[int | None, typer.Option(help=_SILENT)] = None
    max_bucket_reso: Annotated[int | None, typer.Option(help=_SILENT)] = None
    bucket_reso_steps: Annotated[int | None, typer.Option(help=_SILENT)] = None
    skip_image_resolution: Annotated[str | None, typer.Option(help=_SILENT)] = None
    caption_extension: Annotated[str | None, typer.Option(help=_SILENT)] = None

    def given(self) -> dict[str, Any]:
        """Their names and values, as `read_config` takes them; a flag that is off counts as not given."""
        return {name: None if value is False else value for name, value in asdict(self).items()}
