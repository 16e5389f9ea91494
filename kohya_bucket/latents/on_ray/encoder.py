"""What an actor does: it holds an encoder, and turns pieces of work into shards."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kohya_bucket.latents.encode.batch_encoder import BatchEncoder
from kohya_bucket.latents.encode.report import PrecomputeReport
from kohya_bucket.latents.encode.shard_sink import add_batch
from kohya_bucket.latents.encode.sinks import EncodedBatch
from kohya_bucket.latents.encode.worker import PrecomputeWorker
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.on_ray.decode import decode_ahead
from kohya_bucket.latents.on_ray.first_wins import FirstWins
from kohya_bucket.latents.store.contents import Assigned
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.latents.vae.encoder import PosteriorEncoder, check_encoder, encoder_hash, encoder_space

__all__ = ["Done", "EncoderFacts", "EncoderOnRay", "Piece", "PieceWriter", "Run"]


@dataclass(frozen=True)
class EncoderFacts:
    """What the process that hands out work must know of the encoder.

    Attributes:
        identity: its hash.
        place: the machine it is on.
        posterior: it gives mean and standard deviation.
        name: of its class.
    """

    identity: str
    place: str
    space: LatentSpace
    posterior: bool
    name: str


@dataclass(frozen=True)
class Run:
    """What all pieces of a run have in common; `above` is the greatest number in the store when it began."""

    root: str
    above: int
    batch_size: int
    ahead: int
    seed: int
    shard_bytes: int


@dataclass(frozen=True)
class Piece:
    """Items of one bucket that are encoded together and become shards of their own; `key` names them."""

    wanted: LatentItems
    key: str


@dataclass
class Done:
    """What came of a piece; `busy`: seconds for which the encoder had a batch since the last one was done."""

    encoded: int
    failed: list[tuple[str, str]]
    notes: list[str]
    busy: float
    shards: list[str]
    place: str


class PieceWriter(FirstWins, StoreWriter):
    """Writes the shards of a piece."""


class PieceSink:
    """Encoded batches of one piece into shards of its own, in a folder that all machines see, or in object storage."""

    def __init__(self, run: Run, piece: Piece, space: LatentSpace) -> None:
        self._wanted = piece.wanted
        self._texts = piece.wanted.interpolations()
        self._space = space
        self._assigned = Assigned(run.above, piece.key)
        self._writer = PieceWriter(run.root, shard_bytes=run.shard_bytes, flush_seconds=None, assigned=self._assigned)

    def write(self, batch: EncodedBatch) -> None:
        add_batch(self._writer, batch, self._wanted, self._texts, self._space)

    def finish(self) -> list[str]:
        """Write what is left; names of all shards."""
        self._writer.flush()
        return self._assigned.shards


class EncoderOnRay:
    """The actor. Several pieces may be in it at once: while one is encoded, another is decoded or written."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._notes: list[str] = []
        self._of: dict[tuple[str, bool], BatchEncoder] = {}
        self._busy = 0.0

    def load(self) -> EncoderFacts:
        """Load the model."""
        self._encoder = encoder = self._make()
        check_encoder(encoder)
        self._space = encoder_space(encoder)
        return EncoderFacts(
            encoder_hash(encoder), platform.node(), self._space, isinstance(encoder, PosteriorEncoder),
            type(encoder).__name__,
        )  # fmt: skip

    def encode(self, piece: Piece, run: Run) -> Done:
        """Decode, encode and write a piece. Nothing of it is on disk before all of it is encoded, but full shards."""
        encoding = piece.wanted.encoding
        encode = self._of.get((encoding.kind, encoding.flip))
        if encode is None:
            encode = BatchEncoder(self._encoder, encoding.kind, encoding.flip, self._notes.append)
            encode = self._of.setdefault((encoding.kind, encoding.flip), encode)
        report = PrecomputeReport(None, len(piece.wanted))
        worker = PrecomputeWorker(piece.wanted, encode, run.batch_size, report, None, None, 1, run.seed)
        sink = PieceSink(run, piece, self._space)
        batches = decode_ahead(piece.wanted, run.batch_size, run.ahead, as_floats=encode.on_processor)
        worker.encode(batches, sink.write)
        shards = sink.finish()
        notes, self._notes[:] = [*report.notes, *self._notes], []
        before, self._busy = self._busy, sum(one.busy for one in self._of.values())
        return Done(report.encoded, report.failed, notes, self._busy - before, shards, platform.node())
