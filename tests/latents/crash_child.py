"""A run in a process of its own, so that it can be killed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kohya_bucket.latents import precompute_latents
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, dataset_of

GROUP_WAITS = 5  # seconds that an operation of the process group may take


class Told(list):
    """The batches that an encoder was given; each is told as it begins."""

    def __init__(self, teller: Connection) -> None:
        super().__init__()
        self.teller = teller

    def append(self, size: int) -> None:
        super().append(size)
        self.teller.send("batch")


def encode(
    teller: Connection, images: Path, output: Path, format: str = "shards", seconds: float = 0.0,
    rank: tuple[Path, int, int] | None = None, **settings: Any,
) -> None:  # fmt: skip
    """Encode each batch in `seconds`; says "ready", "batch" for each, and at the end what was done.

    `rank` is where the ranks of a process group meet, this one, and how many they are.
    """
    encoder = PosteriorStub(seconds) if format == "npz" else MeanEncoder(seconds)
    encoder.batches = Told(teller)
    dataset = dataset_of(sorted(images.glob("*.png")))
    if rank is not None:
        _meet("begin", *rank)
        place, me, world = rank
        torch.distributed.init_process_group(
            "gloo", init_method=place.as_uri(), rank=me, world_size=world, timeout=timedelta(seconds=GROUP_WAITS)
        )
        torch.distributed.barrier()
    teller.send("ready")
    report = precompute_latents(
        dataset, encoder, output, **{"batch_size": 2, "shard_bytes": 3000, "flush_seconds": 0.1, **settings},
        format=format, architecture="sd", flip=True, workers=2,
    )  # fmt: skip
    done = {name: getattr(report, name) for name in ("encoded", "elsewhere", "failed", "current")}
    if rank is not None:
        _meet("end", *rank)
        torch.distributed.barrier()
    teller.send({**done, "batches": len(encoder.batches)})
    if rank is not None:
        os._exit(0)  # torch's gloo threads now and then abort a process that ends in good order


def _meet(when: str, place: Path, rank: int, world: int) -> None:
    """Wait for all others without the process group, whose time-out a busy machine may exceed in doing nothing."""
    place.with_name(f"{when}{rank}").touch()
    while not all(place.with_name(f"{when}{other}").exists() for other in range(world)):
        time.sleep(0.01)
