"""Encoding into a store on a Ray cluster: this process hands out what is missing, and indexes what was written.

An actor holds an encoder and turns pieces of work into shards. Tasks decode its batches on any machine with free
processors, a few ahead of the encoder. When an actor dies, others do its pieces.

`map_batches` of Ray Data 2.60 with an actor pool reached 0.56 to 0.61 of this speed on the same pieces (480 images,
medians of 3 rounds), and a piece that kills its actor stopped the whole run or was retried forever. Ray's `ActorPool`
with restarts and retries lost the piece that an actor held beside such a piece, and never took back what it had given
to an actor for which the cluster has no room.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.images.parallel import joined_ray, raise_cause
from kohya_bucket.latents.encode.pipeline import Caching, Reader, threads
from kohya_bucket.latents.encode.precompute import check_kind, check_numbers, distinct, finish
from kohya_bucket.latents.encode.worker import (
    Decoded,
    DecodedBatch,
    Keeper,
    PrecomputeReport,
    Reporter,
    StoreSink,
    add_batch,
    decode,
    encode_batches,
    joined_batch,
    pieces_of,
    why_not_decoded,
)
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.store.contents import Assigned, SequenceNumbers
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.storage import place_of
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.latents.vae.batches import MOST_TOGETHER
from kohya_bucket.latents.vae.encoder import BatchEncoder, PosteriorEncoder, check_encoder, encoder_hash, encoder_space
from kohya_bucket.texts import counted, some

_AT_ONCE = 2  # pieces in one actor: one is decoded while another is in the encoder
_TRIES = 3  # of a piece whose actor dies each time, and of actors that die while they load
_PATIENCE = 60.0  # seconds between two lines about waiting


@dataclass(frozen=True)
class Facts:
    """An actor's model, once it is loaded.

    Attributes:
        identity: equal for models with equal latents.
        place: the machine.
        kind: the name of the encoder's class; `has_posterior`: it gives a distribution.
        computes: the type that it computes in and why, if it says so.
    """

    identity: str
    place: str
    kind: str
    has_posterior: bool
    computes: str


@dataclass(frozen=True)
class Run:
    """What all pieces of a run have in common; `above` is the greatest number in the store at its start.

    `batch_size` items are read together; for `together` see `BatchEncoder`.
    """

    root: str
    above: int
    batch_size: int
    ahead: int
    seed: int
    together: int | None


@dataclass(frozen=True)
class Piece:
    """Items of one bucket that are encoded together and become shards of their own, named by `key`."""

    wanted: LatentItems
    key: str


@dataclass
class PieceResult:
    """The result of a piece; `busy`: seconds that batches were in the encoder since the previous piece."""

    encoded: int
    failed: list[tuple[str, str]]
    notes: list[str]
    busy: float
    shards: list[str]
    place: str


@dataclass
class _Task:
    piece: Piece
    deaths: int = 0  # of actors that worked on it

    @property
    def places(self) -> int:
        """A piece that may have killed an actor gets the next one to itself, so that it takes no other piece along."""
        return _AT_ONCE if self.deaths else 1


@dataclass(eq=False)
class _Member:
    actor: Any
    loading: Any  # the reference to its `Facts`
    facts: Facts | None = None
    taken: int = 0  # of its `_AT_ONCE` places
    dead: bool = False


class Actors:
    """The actors of a run. Use as a context manager.

    Args:
        make: loads a VAE, on the machine of each actor, where it must be importable.
        count: how many; None: one for each GPU of the cluster, or one.
        on_gpu: each has its own GPU, if the cluster has any.
        say: called with each line that the user should see at once.

    Attributes:
        count: how many there are or will be; `processors`: of the cluster.

    Raises:
        KohyaBucketError: Ray is missing.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        count: int | None = None,
        *,
        on_gpu: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._ray = joined_ray()
        resources = self._ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if on_gpu else 0
        self._make = make
        # Processors are for decoding: an actor that waits for its device needs none.
        self._kind = self._ray.remote(EncoderOnRay).options(
            num_cpus=0, num_gpus=min(1, gpus), max_concurrency=_AT_ONCE, scheduling_strategy="SPREAD"
        )
        self._say = say
        self._failed_loads = 0
        self._why = ""
        self.count, self.processors = count or gpus or 1, max(1, int(resources.get("CPU", 1)))
        self._members: list[_Member] = [self._new() for _ in range(self.count)]
        self._facts: Facts | None = None

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            self._kill(member)

    def facts(self) -> Facts:
        """Those of the first actor that has loaded its model. Raises as `work`."""
        while self._facts is None:
            self._step({})
        return self._facts

    def work(self, pieces: Iterator[Piece], run: Run) -> Iterator[tuple[Piece, PieceResult | None]]:
        """(piece, result) in the order in which they finish; None is the result of a piece whose actor died every time.

        Raises:
            KohyaBucketError: raised by an actor, or none can be started. Any other error of an actor, too.
        """
        tasks = (_Task(piece) for piece in pieces)
        retries, running = deque[_Task](), dict[Any, tuple[_Member, _Task]]()
        while True:
            # Give every loaded actor one piece, then those with room a second one. A retry needs an idle actor.
            for depth in range(_AT_ONCE):
                for member in self._members:
                    if member.facts is None or member.taken > depth:
                        continue
                    task = retries.popleft() if retries and not member.taken else next(tasks, None)
                    if task is not None:
                        running[member.actor.encode.remote(task.piece, run)] = member, task
                        member.taken += task.places
            # Nothing runs although an actor is loaded: all pieces are done.
            if not running and not retries and any(member.facts is not None for member in self._members):
                return
            for task, result in self._step(running):
                if result is None and task.deaths < _TRIES:
                    retries.append(task)
                else:
                    yield task.piece, result

    def _step(self, running: dict[Any, tuple[_Member, _Task]]) -> list[tuple[_Task, Any]]:
        """Wait until something happens. Finished tasks leave `running`; the result is None if the actor died."""
        loading = {member.loading: member for member in self._members if member.facts is None}
        ready, _ = self._ray.wait([*running, *loading], num_returns=1, timeout=_PATIENCE)
        if not ready and not running and self._say is not None:
            self._say(f"waiting for room in the Ray cluster for {counted(len(loading), 'encoder')}; see `ray status`")
        done = []
        for reference in ready:
            result = self._result(reference)
            if reference in loading:
                self._loaded(loading[reference], result)
                continue
            member, task = running.pop(reference)
            member.taken -= task.places
            if result is None:
                task.deaths += 1
                self._replace(member)
            done.append((task, result))
        return done

    def _result(self, reference: Any) -> Any:
        """The result from an actor; None if it died first."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise_cause(error)
        except errors.RayError as error:
            self._why = next(filter(None, map(str.strip, reversed(str(error).splitlines()))), type(error).__name__)
            return None

    def _loaded(self, member: _Member, facts: Facts | None) -> None:
        if facts is None:
            self._failed_loads += 1
            if self._failed_loads >= _TRIES * len(self._members):
                raise KohyaBucketError(
                    f"the process that loads the model ended {self._failed_loads} times, at last because: {self._why}; "
                    "see Ray's logs"
                )
            self._replace(member)
            return
        self._failed_loads = 0
        self._facts = self._facts or facts
        if facts.identity != self._facts.identity:
            raise KohyaBucketError(
                f"{facts.place} has other weights than {self._facts.place}: give every machine the same files"
            )
        member.facts = facts

    def _new(self) -> _Member:
        actor = self._kind.remote(self._make)
        return _Member(actor, actor.load.remote())

    def _replace(self, member: _Member) -> None:
        if not member.dead:
            self._kill(member)
            self._members[self._members.index(member)] = self._new()

    def _kill(self, member: _Member) -> None:
        member.dead = True
        with suppress(Exception):  # it is dead already, or Ray is
            self._ray.kill(member.actor)


_Result = Decoded | str
"""What was decoded of an item, or why it cannot be."""


def _decode(wanted: LatentItems, as_floats: bool) -> list[_Result]:
    def one(i: int) -> _Result:
        try:
            return decode(wanted, i, as_floats=as_floats)
        except KohyaBucketError as error:
            return why_not_decoded(error)

    with ThreadPoolExecutor(len(wanted) if wanted.images.are_remote else 1) as pool:  # requests wait in parallel
        return list(pool.map(one, range(len(wanted))))


def _decode_in_task(wanted: LatentItems, as_floats: bool) -> list[_Result]:
    """What a task on any machine decodes of all items; one image at a time if its process kept dying."""
    import ray

    try:
        results: list[_Result] = ray.get(
            ray.remote(_decode).options(num_cpus=1, max_retries=2).remote(wanted, as_floats)
        )
    except ray.exceptions.RayTaskError as error:
        raise_cause(error)
    except ray.exceptions.RayError as error:
        if len(wanted) == 1:
            return [f"the process that decodes it died repeatedly ({type(error).__name__}): look at this file"]
        return [result for i in range(len(wanted)) for result in _decode_in_task(wanted.subset([i]), as_floats)]
    return results


def decode_ahead(
    wanted: LatentItems, batch_size: int, ahead: int, failed: Callable[[int, str], object], *, as_floats: bool
) -> Iterator[DecodedBatch]:
    """The batches of a piece of one bucket, `ahead` of them decoded at once; `failed` is as for images decoded here."""

    def stop(_: list[int], error: Exception) -> bool:
        raise error

    reader = Reader[list[int], list[_Result]](
        read=lambda items: _decode_in_task(wanted.subset(items), as_floats),
        shape=lambda _: None,
        most=lambda _: 1,
        nbytes=lambda _: 0,
        failed=stop,
        further=ahead,
    )
    every = list(range(len(wanted)))
    with threads(ahead, "tasks") as pool:
        for items, results in reader.ahead((every[at : at + batch_size] for at in every[::batch_size]), pool):
            good = dict[int, Decoded]()
            for i, result in zip(items, results, strict=True):
                if isinstance(result, str):
                    failed(i, result)
                else:
                    good[i] = result
            if good:
                yield joined_batch(list(good), list(good.values()))


class EncoderOnRay:
    """An actor that holds a VAE. While one piece is encoded, another is decoded or written."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._notes: list[str] = []
        self._encoders: dict[tuple[str, bool, int | None], BatchEncoder] = {}  # by kind, flip and images at once
        self._busy = 0.0

    def load(self) -> Facts:
        """Load the model."""
        self._encoder = encoder = self._make()
        check_encoder(encoder)
        self._space = encoder_space(encoder)
        kind, has_posterior = type(encoder).__name__, isinstance(encoder, PosteriorEncoder)
        return Facts(encoder_hash(encoder), platform.node(), kind, has_posterior, getattr(encoder, "computes", ""))

    def encode(self, piece: Piece, run: Run) -> PieceResult:
        """Decode, encode and write a piece. Apart from full shards nothing reaches the disk before the end."""
        encoding = piece.wanted.encoding
        options = encoding.kind, encoding.flip, run.together
        encode = self._encoders.get(options)
        if encode is None:
            encode = BatchEncoder(self._encoder, encoding.kind, encoding.flip, self._notes.append, run.together)
            encode = self._encoders.setdefault(options, encode)
        report = PrecomputeReport(None, len(piece.wanted))
        # A folder that all machines see, or object storage.
        writer = StoreWriter(run.root, flush_seconds=None, assigned=Assigned(run.above, piece.key))
        put = partial(add_batch, writer, wanted=piece.wanted, space=self._space)
        keeper = Keeper(piece.wanted, encode, put, Reporter(report), len(piece.wanted))
        batches = decode_ahead(
            piece.wanted, run.batch_size, run.ahead, keeper.fail, as_floats=encode.on_processor
        )  # fmt: skip
        with Caching("image", len(piece.wanted), keep=keeper.keep, say=_nothing).running() as caching:
            encode_batches(piece.wanted, encode, batches, caching, run.seed)
        writer.flush()
        notes, self._notes[:] = [*report.notes, *self._notes], []
        earlier, self._busy = self._busy, sum(encoder.busy for encoder in self._encoders.values())
        return PieceResult(report.encoded, report.failed, notes, self._busy - earlier, writer.shards, platform.node())


_SEEN_AFTER = 60.0  # seconds; network file systems cache listings for about as long
_LOST = "the process that encoded it died every time: see Ray's logs; it may have run out of memory"


def encode_on_ray(
    wanted: LatentItems,
    crew: Actors,
    output_dir: str | os.PathLike[str],
    images_root: Path,
    *,
    batch_size: int | None = None,
    progress_callback: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
    workers: int | None = None,
    seed: int = 0,
) -> PrecomputeReport:
    """`encode_items` into a store by actors on a Ray cluster. A piece of work becomes one or more shards.

    All machines must see the images and `output_dir` under the same paths.

    Args:
        workers: batches decoded in advance for each piece in an encoder; None: its share of the processors, plus 2.
        seed: see `encode_items`.

    Raises:
        KohyaBucketError: as `encode_items`; or raised by an actor.
    """
    check_numbers(batch_size)
    check_kind(wanted.encoding.kind, crew.facts().has_posterior, crew.facts().kind)
    wanted, refused = distinct(wanted)
    output = place_of(output_dir)
    report = PrecomputeReport(output, len(wanted) + len(refused), without_bucket=wanted.without_bucket)
    reporter = Reporter(report, say, progress_callback)
    sink = StoreSink(output, wanted, images_root=images_root)
    assert isinstance(sink.wanted, LatentItems)
    wanted = sink.wanted  # with the captions that the store has
    to_do, report.reasons = sink.missing()
    report.current = len(wanted) - int(to_do.sum())
    ahead = workers or 2 + -(-crew.processors // crew.count)
    read_together = batch_size or MOST_TOGETHER
    above = SequenceNumbers(sink.store.layout).greatest()
    run = Run(os.fspath(output), above, read_together, ahead, seed, batch_size)
    started = time.monotonic()
    missing = wanted if to_do.all() else wanted.subset(np.flatnonzero(to_do).tolist())
    caching = Caching("image", len(missing), report.current, keep=_nothing, say=reporter.say)
    with caching.running():
        busy = _encode(_pieces(missing, read_together), caching, crew, run, reporter)
    report.seconds = time.monotonic() - started
    report.device_idle = max(0.0, report.seconds - busy / crew.count)
    finish(reporter, wanted, refused, sink)
    return report


def _nothing(_: Any) -> None:
    """Actors keep what they encode, and say nothing of it."""


def _encode(pieces: Iterator[Piece], caching: Caching, crew: Actors, run: Run, reporter: Reporter) -> float:
    """Hand out all pieces; returns the seconds that the encoders were busy."""
    report, busy, seen, total = reporter.report, 0.0, set[str](), caching.to_do
    reporter.show(total)
    for piece, done in crew.work(pieces, run):
        if done is None:
            for path in piece.wanted.paths:
                reporter.fail(path, _LOST)
        else:
            for note in done.notes:
                reporter.tell(note)
            if done.place not in seen:
                check_seen(Layout(run.root), done.shards, done.place)
                seen.add(done.place)
            busy += done.busy
            report.encoded += done.encoded
            caching.put(None, done.encoded)
            report.failed += done.failed
        reporter.show(total)
    return busy


def check_seen(layout: Layout, shards: list[str], place: str) -> None:
    """Raise `LatentStoreError` if files written by another machine do not appear on this one."""
    deadline = time.monotonic() + _SEEN_AFTER
    while unseen := set(shards) - layout.shard_sizes().keys():
        if time.monotonic() > deadline:
            raise LatentStoreError(
                f"{place} has written {some(sorted(unseen))} into {layout.root}, which is not there on this machine: "
                "give a folder that all machines share, or an address in object storage"
            )
        time.sleep(0.5)


def _pieces(missing: LatentItems, batch_size: int) -> Iterator[Piece]:
    for name, items in pieces_of(missing, batch_size):
        wanted = missing.subset(items.tolist())
        # An edited image makes another piece, with other shard names.
        state = wanted.source_bytes.tobytes() + wanted.source_mtime_ns.tobytes()
        yield Piece(wanted, f"{name} {hashlib.blake2b(state, digest_size=8).hexdigest()}")
