"""Items into a store, on a Ray cluster: this process hands out what is missing, and indexes what was written.

An actor holds an encoder and turns pieces of work into shards. Tasks decode its batches, on whichever machines have
processors to spare, a few ahead of the encoder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.encode.batch_encoder import BatchEncoder
from kohya_bucket.latents.encode.precompute import check_kind, check_target, distinct, finish
from kohya_bucket.latents.encode.sinks import EncodedBatch, ShardSink, add_batch
from kohya_bucket.latents.encode.worker import DecodedBatch, PrecomputeReport, PrecomputeWorker, pieces_of, prefetch
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.on_ray.actors import Actors, raise_cause
from kohya_bucket.latents.remote.remote_path import place_of
from kohya_bucket.latents.store.contents import Assigned, Generations
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.latents.vae.encoder import PosteriorEncoder, check_encoder, encoder_hash, encoder_space
from kohya_bucket.texts import some

__all__ = ["Encoders", "Run", "check_seen", "encode_on_ray", "encoders"]


def decode_ahead(wanted: LatentItems, batch_size: int, ahead: int, *, as_floats: bool) -> Iterator[DecodedBatch]:
    """The batches of a piece, all of one bucket; at most `ahead` are decoded, or being decoded, and not yet taken."""
    running: deque[tuple[list[int], Any]] = deque()
    starts = iter(range(0, len(wanted), batch_size))
    while True:
        while len(running) < ahead and (at := next(starts, None)) is not None:
            items = list(range(at, min(at + batch_size, len(wanted))))
            running.append((items, _begin(wanted.subset(items), as_floats)))
        if not running:
            return
        items, reference = running.popleft()
        yield _complete(wanted, items, reference, as_floats)


def _begin(wanted: LatentItems, as_floats: bool) -> Any:
    import ray

    return ray.remote(_decode).options(num_cpus=1, max_retries=2).remote(wanted, as_floats)


def _decode(wanted: LatentItems, as_floats: bool) -> DecodedBatch:
    """All items as one batch."""
    n = len(wanted)
    with ThreadPoolExecutor(n if wanted.images.are_far else 1) as pool:  # requests wait side by side
        return next(prefetch(range(n), wanted, n, pool, n, as_floats=as_floats))


def _complete(wanted: LatentItems, items: list[int], reference: Any, as_floats: bool) -> DecodedBatch:
    """What a task decoded; one image at a time where its process ended again and again."""
    import ray

    try:
        batch: DecodedBatch = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise_cause(error)
    except ray.exceptions.RayError as error:
        if len(items) == 1:
            why = f"the process that decodes it ended again and again ({type(error).__name__}): look at this file"
            return DecodedBatch([], None, [], [(items[0], why)])
        ones = [_complete(wanted, [i], _begin(wanted.subset([i]), as_floats), as_floats) for i in items]
        pixels = [one.pixels for one in ones if one.pixels is not None]
        return DecodedBatch(
            [i for one in ones for i in one.items], np.concatenate(pixels) if pixels else None,
            [mask for one in ones for mask in one.masks], [failure for one in ones for failure in one.failed],
        )  # fmt: skip
    return replace(
        batch,
        items=[items[k] for k in batch.items],
        # What Ray gives is mapped read-only, and an encoder may work in place.
        pixels=None if batch.pixels is None else np.array(batch.pixels),
        failed=[(items[k], why) for k, why in batch.failed],
    )


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


class PieceSink:
    """Encoded batches of one piece into shards of its own, in a folder that all machines see, or in object storage."""

    def __init__(self, run: Run, piece: Piece, space: LatentSpace) -> None:
        self._wanted = piece.wanted
        self._space = space
        self._assigned = Assigned(run.above, piece.key)
        self._writer = StoreWriter(run.root, shard_bytes=run.shard_bytes, flush_seconds=None, assigned=self._assigned)

    def write(self, batch: EncodedBatch) -> None:
        add_batch(self._writer, batch, self._wanted, self._space)

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


_SEEN_AFTER = 60.0  # seconds; network file systems keep what they know of a folder for about as long
Encoders = Actors[EncoderFacts]
_LOST = "the process that encoded it ended, each of several times: see Ray's logs, perhaps for want of memory"


def encoders(
    make: Callable[[], object], concurrency: int | None = None, *, on_gpu: bool = True,
    say: Callable[[str], None] | None = None,
) -> Encoders:  # fmt: skip
    """Actors for `encode_on_ray`.

    Args:
        make: loads the encoder, on the machine of each actor; it must be importable there.
        concurrency: how many; None: one for each GPU of the cluster, or one.
        on_gpu, say: see `Actors`.
    """
    return Actors(EncoderOnRay, make, concurrency, on_gpu=on_gpu, say=say)


def encode_on_ray(
    wanted: LatentItems, crew: Encoders, output_dir: str | os.PathLike[str], images_root: Path, *,
    batch_size: int = 8, progress_callback: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None, workers: int | None = None, seed: int = 0, shard_bytes: int = 256 << 20,
) -> PrecomputeReport:  # fmt: skip
    """As `encode_items` with shards, by actors on a Ray cluster. A piece of work becomes one shard, or several.

    All machines must see the images and `output_dir` under the same paths.

    Args:
        workers: batches that are decoded ahead for each piece in an encoder; None: its share of the processors, and 2.
        seed, shard_bytes: as for `encode_items`.

    Raises:
        KohyaBucketError: as `encode_items`; and what an actor raised.
    """
    facts = crew.facts()
    check_target(wanted.encoding.kind, output_dir, "shards")
    check_kind(wanted.encoding.kind, facts.posterior, facts.name)
    wanted, nameless = distinct(wanted)
    output = place_of(output_dir)
    report = PrecomputeReport(output, len(wanted) + len(nameless), without_bucket=wanted.without_bucket)

    def tell(text: str) -> None:
        report.notes.append(text)
        if say is not None:
            say(text)

    sink = ShardSink(output, wanted, facts.space, images_root, shard_bytes=shard_bytes, flush_seconds=None)
    to_do, report.reasons = sink.missing()
    report.current = len(wanted) - int(to_do.sum())
    ahead = workers or 2 + -(-crew.processors // crew.count)
    run = Run(os.fspath(output), Generations(sink.store.layout).greatest(), batch_size, ahead, seed, shard_bytes)
    started, busy = time.monotonic(), 0.0
    if to_do.any():
        missing = wanted if to_do.all() else wanted.subset(np.flatnonzero(to_do).tolist())
        busy = _encode(missing, crew, run, report, tell, progress_callback)
    report.seconds = time.monotonic() - started
    report.device_idle = max(0.0, report.seconds - busy / crew.count)
    finish(report, wanted, nameless, sink, tell)
    return report


def _encode(
    missing: LatentItems, crew: Encoders, run: Run, report: PrecomputeReport, tell: Callable[[str], None],
    progress: Callable[[int, int], None] | None,
) -> float:  # fmt: skip
    """Hand out all pieces; returns the seconds for which encoders were busy."""
    busy, seen = 0.0, set[str]()
    show = progress or (lambda *_: None)
    show(0, len(missing))
    done: Done | None
    for piece, done in crew.work(
        _pieces(missing, run.batch_size), lambda actor, piece: actor.encode.remote(piece, run)
    ):
        if done is None:
            report.failed += [(path, _LOST) for path in piece.wanted.paths]
            for path in piece.wanted.paths:
                tell(f"{path}: {_LOST}")
        else:
            for note in done.notes:
                tell(note)
            if done.place not in seen:
                check_seen(Layout(run.root), done.shards, done.place)
                seen.add(done.place)
            busy += done.busy
            report.encoded += done.encoded
            report.failed += done.failed
        show(report.encoded + len(report.failed), len(missing))
    return busy


def check_seen(layout: Layout, shards: list[str], place: str) -> None:
    """Refuse to go on where what another machine has written is not to be seen on this one.

    Raises:
        LatentStoreError: it is not.
    """
    deadline = time.monotonic() + _SEEN_AFTER
    while unseen := set(shards) - layout.shard_sizes().keys():
        if time.monotonic() > deadline:
            raise LatentStoreError(
                f"{place} has written {some(sorted(unseen))} into {layout.root}, which is not there on this "
                "machine: give "
                "a folder that all machines share, or an address in object storage"
            )
        time.sleep(0.5)


def _pieces(missing: LatentItems, batch_size: int) -> Iterator[Piece]:
    for name, items in pieces_of(missing, batch_size):
        wanted = missing.subset(items.tolist())
        # Another image under an old name makes another piece.
        state = wanted.source_bytes.tobytes() + wanted.source_mtime_ns.tobytes()
        yield Piece(wanted, f"{name} {hashlib.blake2b(state, digest_size=8).hexdigest()}")
