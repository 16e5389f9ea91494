"""Actors that each hold a model, and the pieces of work that they are given: whoever dies, others do its pieces.

`map_batches` of Ray Data 2.60 with an actor pool did the same pieces at 0.56 to 0.61 of this speed (480 images, medians
of 3 rounds), and a piece at which its actor ends stopped the whole run, or was tried for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.parallel import joined_ray
from kohya_bucket.texts import counted

__all__ = ["Actors", "Facts", "raise_cause"]

P = TypeVar("P")

_AT_ONCE = 2  # pieces in one actor: the next is decoded while one is in the encoder
_TRIES = 3  # of a piece whose actor ends each time, and of actors that end while they load
_PATIENCE = 60.0


@dataclass(frozen=True)
class Facts:
    """What an actor says of its model once that is loaded.

    Attributes:
        identity: equal for models that give equal outputs.
        place: the machine that it is on.
        model: what else must be known to hand out work.
    """

    identity: str
    place: str
    model: Any


@dataclass
class _Task(Generic[P]):
    piece: P
    deaths: int = 0  # of actors that had it

    @property
    def load(self) -> int:
        """One at whose side an actor died has the next for itself, so that no other piece dies of it again."""
        return _AT_ONCE if self.deaths else 1


@dataclass(eq=False)
class _Member:
    actor: Any
    loading: Any
    facts: Facts | None = None
    load: int = 0
    dead: bool = False


class Actors:
    """As many actors as asked for, or as the cluster has room for. Use as a context manager.

    Args:
        kind: their class. Its method `load()` gives `Facts`.
        make: what `kind` is made with: loads a model.
        count: how many; None: one for each GPU of the cluster, or one.
        on_gpu: each has a GPU of its own, where the cluster has any.
        say: called with a line of text for whatever a user should know at once.

    Raises:
        KohyaBucketError: Ray is missing.
    """

    def __init__(
        self, kind: type, make: Callable[[], Any], count: int | None = None, *, on_gpu: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._ray = joined_ray()
        gpus = int(self._ray.cluster_resources().get("GPU", 0)) if on_gpu else 0
        self._make = make
        # Decoding has the processors: an actor that waits for its device needs none.
        self._kind = self._ray.remote(kind).options(
            num_cpus=0, num_gpus=min(1, gpus), max_concurrency=_AT_ONCE, scheduling_strategy="SPREAD"
        )
        self._say = say
        self._failed_loads = 0
        self._why = ""
        self._members: list[_Member] = [self._new() for _ in range(count or gpus or 1)]
        self._known: Facts | None = None

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            self._kill(member)

    @property
    def count(self) -> int:
        """How many there are, or will be."""
        return len(self._members)

    @property
    def processors(self) -> int:
        """How many the cluster has."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def facts(self) -> Facts:
        """What the first one says that has loaded its model. Raises as `work`."""
        while self._known is None:
            self._step({})
        return self._known

    def work(self, pieces: Iterable[P], do: Callable[[Any, P], Any]) -> Iterator[tuple[P, Any]]:
        """(piece, what came of it) as they are done; the latter is None where its actor ended every time.

        Args:
            do: starts the work on a piece, with an actor, and gives the reference to its result.

        Raises:
            KohyaBucketError: an actor raised it, or none can be had. Any other error of theirs, too.
        """
        source = (_Task(piece) for piece in pieces)
        again, running = deque[_Task[P]](), dict[Any, tuple[_Member, _Task[P]]]()
        while True:
            for depth in range(_AT_ONCE):
                for member in self._members:
                    if member.facts is None or member.load > depth:
                        continue
                    task = again.popleft() if again and not member.load else next(source, None)
                    if task is not None:
                        running[do(member.actor, task.piece)] = member, task
                        member.load += task.load
            if not running and not again and any(member.facts is not None for member in self._members):
                return
            for task, result in self._step(running):
                if result is None and task.deaths < _TRIES:
                    again.append(task)
                else:
                    yield task.piece, result

    def _step(self, running: dict[Any, tuple[_Member, _Task[P]]]) -> list[tuple[_Task[P], Any]]:
        """Wait until something happens. What is done leaves `running`; its result is None where its actor ended."""
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
            member.load -= task.load
            if result is None:
                task.deaths += 1
                self._replace(member)
            done.append((task, result))
        return done

    def _result(self, reference: Any) -> Any:
        """What an actor gave; None if it ended before."""
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
        self._known = self._known or facts
        if facts.identity != self._known.identity:
            raise KohyaBucketError(
                f"{facts.place} has other weights than {self._known.place}: give every machine the same files"
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
        with suppress(Exception):  # it is gone already, or Ray is
            self._ray.kill(member.actor)


def raise_cause(error: Any) -> NoReturn:
    """Raise what another process raised, as it was raised there."""
    cause = getattr(error, "cause", None)
    raise cause if isinstance(cause, Exception) else error
