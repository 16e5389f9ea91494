"""Where a command encodes: in this process, or on a Ray cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from kohya_bucket.cli.engines import engine_of
from kohya_bucket.errors import ConfigError

__all__ = ["ClusterOptions"]


@dataclass(frozen=True)
class ClusterOptions:
    """Which engine, and how many encoders it has; each field is an option."""

    engine: Annotated[str, typer.Option(help="local, or ray: a Ray cluster.")] = "local"
    concurrency: Annotated[int | None, typer.Option(min=1, help="With ray: encoders; by default one for each GPU.")] = (
        None
    )

    def on_ray(self) -> bool:
        """Whether it is the cluster.

        Raises:
            KohyaBucketError: there is no such engine, or what is given does not fit it.
        """
        if engine_of(self.engine) != "ray":
            if self.concurrency is not None:
                raise ConfigError("--concurrency says how many encoders Ray starts: add --engine ray, or leave it out")
            return False
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError("--engine ray starts its processes itself: start the command once, without torchrun")
        return True
