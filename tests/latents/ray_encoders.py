"""Encoders for actors: they say what they do in a file, since they are in other processes."""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.origins import Origins
from tests.latents.stub_encoders import MeanEncoder


class Batch(NamedTuple):
    """What an encoder was given: how many images, in which process, on which of Ray's nodes."""

    images: int
    pid: int
    node: str


class Telling(MeanEncoder):
    """Adds a line to `log` as each batch begins; ends its process at images of the size `deadly`."""

    def __init__(self, log: Path, seconds: float = 0.0, deadly: tuple[int, int] | None = None) -> None:
        super().__init__(seconds)
        self.log = log
        self.deadly = deadly

    def encode(self, pixels):
        import ray

        if self.deadly == (pixels.shape[3], pixels.shape[2]):
            os._exit(1)
        with open(self.log, "a", encoding="utf-8") as out:
            out.write(f"{len(pixels)} {os.getpid()} {ray.get_runtime_context().get_node_id()}\n")
        return super().encode(pixels)


def told(log: Path) -> list[Batch]:
    """What encoders have said so far."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [Batch(int(images), int(pid), node) for images, pid, node in map(str.split, lines)]


@dataclass(frozen=True, eq=False)
class Deadly(Origins):
    """Images, the one named `deadly` of which ends the process that decodes it."""

    deadly: str = ""

    def subset(self, items):
        return Deadly(**vars(super().subset(items)), deadly=self.deadly)

    def pixels(self, i, alpha=False):
        if self.names[i] == self.deadly:
            os._exit(1)
        return super().pixels(i, alpha)


def broken():
    raise KohyaBucketError("vae.safetensors: cannot be read; download it again")


def different():
    encoder = MeanEncoder(2.0)
    encoder.fingerprint = uuid.uuid4().hex
    return encoder
