"""What is stored of an encoded image, and how, as options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kohya_bucket.cli.for_sd_scripts import FOR_HELP, version_for
from kohya_bucket.errors import ConfigError

if TYPE_CHECKING:
    from kohya_bucket.latents.items import EncodeOptions

__all__ = ["StoreOptions"]


@dataclass(frozen=True)
class StoreOptions:
    """Which latents are made, and in which files they lie; each field is an option."""

    flip: Annotated[bool, typer.Option("--flip", help="Store the mirrored images too.")] = False
    mask: Annotated[bool, typer.Option("--mask", help="Store the alpha channel too.")] = False
    posterior: Annotated[bool, typer.Option("--posterior", help="Store mean and deviation, no sample.")] = False
    format: Annotated[str, typer.Option(help="shards, or npz: sd-scripts' own files.")] = "shards"
    for_: Annotated[str, typer.Option("--for", help=FOR_HELP)] = ""
    interpolation: Annotated[str, typer.Option(help="Filter of the resize; auto is sd-scripts'.")] = "auto"
    collection: Annotated[str, typer.Option(help="Part of the store, to keep several models apart.")] = ""

    def reader(self) -> str:
        """The version of sd-scripts that npz are for; "" for shards.

        Raises:
            ConfigError: shards for an sd-scripts, which reads none.
        """
        if self.for_ and self.format != "npz":
            raise ConfigError("--for says which sd-scripts will read npz: add --format npz, or leave it out")
        return version_for(self.for_) if self.format == "npz" else ""

    def recipe(self, dtype: str, output: Path | None) -> EncodeOptions:
        """How latents are made with these options; the hash of the encoder is still missing.

        Raises:
            KohyaBucketError: an option has an unknown value, or the format cannot hold what is asked for.
        """
        from kohya_bucket.images.resize import choose_interpolation
        from kohya_bucket.latents.dtypes import dtype_name
        from kohya_bucket.latents.encode.precompute import check_target
        from kohya_bucket.latents.items import EncodeOptions

        kind = "posterior" if self.posterior else "latents"
        check_target(kind, output, self.format)
        choose_interpolation((1, 1), (1, 1), self.interpolation)
        return EncodeOptions("", dtype_name(dtype), kind, self.flip, self.mask, self.interpolation, self.collection)
