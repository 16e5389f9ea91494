"""Items into a store, on a Ray cluster: this process hands out what is missing, and indexes what was written."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.encode.encode_items import check_kind, check_target, distinct, finish
from kohya_bucket.latents.encode.pieces import pieces_of
from kohya_bucket.latents.encode.report import PrecomputeReport
from kohya_bucket.latents.encode.shard_sink import ShardSink
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.on_ray.actors import Actors
from kohya_bucket.latents.on_ray.encoder import Done, EncoderFacts, EncoderOnRay, Piece, Run
from kohya_bucket.latents.remote.remote_path import place_of
from kohya_bucket.latents.store.contents import Generations
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.texts import some

__all__ = ["Encoders", "check_seen", "encode_on_ray", "encoders"]

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

    sink = ShardSink(
        output, wanted, facts.space, images_root, lambda _: None, shard_bytes=shard_bytes, flush_seconds=None
    )
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
