"""A run in a process of its own, so that it can be killed."""

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kohya_bucket.latents import StoreWriter, precompute_latents
from kohya_bucket.latents.encode import worker
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, dataset_of


class Told(list):
    """The batches that an encoder was given; each is told as it begins."""

    def __init__(self, teller: Connection) -> None:
        super().__init__()
        self.teller = teller

    def append(self, size: int) -> None:
        super().append(size)
        self.teller.send("batch")


def encode(
    teller: Connection, images: Path, output: Path, format: str = "shards", seconds: float = 0.0, **settings: Any
) -> None:
    """Encode each batch in `seconds`; says "ready", "batch" for each, and at the end what was done."""
    encoder = PosteriorStub(seconds) if format == "npz" else MeanEncoder(seconds)
    encoder.batches = Told(teller)
    dataset = dataset_of(sorted(images.glob("*.png")))
    worker.StoreWriter = partial(StoreWriter, shard_bytes=3000, flush_seconds=0.1)  # in this process
    teller.send("ready")
    report = precompute_latents(
        dataset, encoder, NpzFiles("sd", output) if format == "npz" else output,
        **{"batch_size": 2, **settings}, flip=True, workers=2,
    )  # fmt: skip
    teller.send({name: getattr(report, name) for name in ("encoded", "elsewhere", "failed", "current", "notes")})
