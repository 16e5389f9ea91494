"""Ranks make sure that they are about to train the same plan, so that a mismatch fails instead of deadlocking."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from kohya_bucket._version import __version__
from kohya_bucket.checks import integer, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning import EpochPlan
from kohya_bucket.planning.fingerprint import NAMES, agree

_log = logging.getLogger(__name__)


def world() -> tuple[int, int]:
    """(number of ranks, this rank), as torch.distributed knows them; (1, 0) without it."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def given_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
    """(number of ranks, this rank) as a user gave them, or None: `world()` when they are needed.

    Raises:
        PlanError: one without the other, or a rank that is not below the number.
    """
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None:
        raise PlanError("num_replicas and rank belong together: give both, or neither")
    replicas, number = whole("num_replicas", num_replicas, 1), integer("rank", rank)
    if not 0 <= number < replicas:
        raise PlanError(f"rank is {rank}, but with num_replicas={num_replicas} must be 0 to {replicas - 1}")
    return replicas, number


def time_out() -> timedelta:
    """How long the run's own process group waits for a rank, as `init_process_group` was told."""
    try:
        devices = dist.group.WORLD._device_types
        options = dist.group.WORLD._get_backend(devices[0]).options
        return timedelta(seconds=options._timeout.total_seconds())
    except (AttributeError, IndexError, RuntimeError):  # torch has no public name for it
        return timedelta(seconds=default_pg_timeout.total_seconds())


def gather(statement: Mapping[str, Any], group: Any = None) -> list[Mapping[str, Any]]:
    """What every rank of a process group gives, by rank; the default group is all ranks of a run."""
    everyone: list[Any] = [None] * world()[0]
    dist.all_gather_object(everyone, statement, group=group)
    return everyone


def agree_on(plan: EpochPlan, names_digest: str | None = None, names: Callable[[], Sequence[str]] = tuple) -> None:
    """Compare this rank's plan with those of all other ranks; returns at once in a single process.

    Every rank of the default process group must call this. Works on a gloo group of its own, so it needs no GPU,
    and a rank that does not come is noticed after the time-out of the run's process group: another rank may be saving
    or drawing samples meanwhile. Where `names_digest` is known, numbers must stand for the same images; `names` gives
    those of this rank.

    Raises:
        RanksDifferError: the plans differ, with the difference, on every rank.
        PlanError: a rank did not come.
    """
    if world()[0] == 1:
        return

    def gather_soon(statement: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        group, patience = None, time_out()
        try:
            # Not kept for the next epoch: a gloo group that is still alive when Python exits can abort the process.
            group = dist.new_group(backend="gloo", timeout=patience)
            return gather(statement, group)
        except RuntimeError as error:
            raise PlanError(
                f"epoch {plan.epoch}: not all ranks came to compare their plans within "
                f"{patience.total_seconds():g} s, the time-out of the process group; see the other "
                f"ranks' logs for what stopped them ({error})"
            ) from error
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    compared = {  # the hash, and what names the difference if the hashes differ
        **plan.fingerprint, "world_size": plan.world_size, "first step": plan.first_step, "steps": plan.steps,
        "kohya_bucket": __version__, "numpy": np.__version__, "hash": plan.hash, NAMES: names_digest,
    }  # fmt: skip
    remedy = "Give all ranks the same data, settings, seed and epoch"
    agree(compared, gather_soon, "is about to train another plan", remedy, deciding="hash", names=names)


class MeetingPlace(NamedTuple):
    """Where the processes of a run find each other's notes, for worker processes too, which belong to no process group.

    Attributes:
        world: number of ranks, and this one.
        patience: seconds to wait for a rank, as `time_out`.
        address: host and port of the run's TCPStore, or the path of its FileStore; empty where it has neither.
    """

    world: tuple[int, int]
    patience: float
    address: tuple[str, int] | str

    @classmethod
    def of_this_run(cls) -> MeetingPlace | None:
        """That of torch.distributed in this process; None in a single process."""
        ranks = world()
        if ranks[0] == 1:
            return None
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        address: tuple[str, int] | str = ""
        if isinstance(store, dist.TCPStore):
            address = store.host, store.port
        elif isinstance(store, dist.FileStore):
            address = store.path
        return cls(ranks, time_out().total_seconds(), address)


_LOOK_AGAIN = timedelta(seconds=0.25)  # whether rank 0 has opened another meeting


class Meeting:
    """One occasion on which ranks compare notes, in rounds. A rank's n-th meeting of a name is with the others' n-th.

    A store may hold notes of processes that were started before these ones, by an elastic restart, and nothing that all
    nodes know tells the two apart: TORCHELASTIC_RESTART_COUNT is a node's own. So rank 0 opens each meeting under a key
    that is new, and opens it to those who have answered.

    Raises:
        PlanError: in `gather`: a rank did not come.
    """

    def __init__(self, place: MeetingPlace, name: str) -> None:
        self._ranks, self._rank = place.world
        self._patience = timedelta(seconds=place.patience)
        # A connection of its own: waiting would hold up the process group's, and a fork would share its parent's.
        if isinstance(place.address, tuple):
            host, port = place.address
            self._store: dist.Store = dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=self._patience
            )
        else:
            self._store = dist.FileStore(place.address)
        self._called = f"kohya_bucket/{name}"  # key of where the last meeting of this name is
        self._prefix = ""  # of this meeting's keys, once all ranks have come
        self._round = 0

    def gather(self, statement: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """What every rank gives in this round, by rank."""
        self._round += 1
        try:
            self._prefix = self._prefix or (self._opened() if self._rank == 0 else self._joined())
            notes = self._notes(f"{self._prefix}/{self._round}", json.dumps(statement))
        except RuntimeError as error:
            raise PlanError(
                f"not all ranks came to compare what they read within {self._patience.total_seconds():g} s, the "
                f"time-out of the process group; see the other ranks' logs for what stopped them ({error})"
            ) from error
        if isinstance(self._store, dist.TCPStore):
            if self._round > 2:  # all ranks have read it
                self._store.delete_key(f"{self._prefix}/{self._round - 2}/{self._rank}")
            elif self._round == 1 and self._rank == 0:  # all have come; who is early at the next one waits for its call
                self._store.delete_key(self._called)
        return [json.loads(note) for note in notes]

    def _notes(self, prefix: str, own: str) -> list[str]:
        """What every rank has put under a prefix, this one `own`."""
        keys = [f"{prefix}/{rank}" for rank in range(self._ranks)]
        self._store.set(keys[self._rank], own)
        self._store.wait(keys, self._patience)
        return [self._store.get(key).decode() for key in keys]

    def _opened(self) -> str:
        """Rank 0: the prefix of a new meeting, which all ranks have answered to."""
        prefix = f"{self._called}/{uuid4().hex}"
        self._store.set(self._called, prefix)
        self._store.set(f"{prefix}/come", json.dumps(self._notes(f"{prefix}/name", "")))
        return prefix

    def _joined(self) -> str:
        """Another rank: the same, once this rank is among those who have come; an older meeting does not know it."""
        own, end = uuid4().hex, monotonic() + self._patience.total_seconds()
        while True:
            self._store.wait([self._called], timedelta(seconds=max(end - monotonic(), 0.001)))
            prefix: str = self._store.get(self._called).decode()
            self._store.set(f"{prefix}/name/{self._rank}", own)
            come = f"{prefix}/come"
            with suppress(RuntimeError):  # not all have: rank 0 may meanwhile call to another one
                self._store.wait([come], _LOOK_AGAIN)
                if json.loads(self._store.get(come))[self._rank] == own:
                    return prefix
            if monotonic() > end:
                raise RuntimeError("rank 0 has opened no meeting")
            sleep(_LOOK_AGAIN.total_seconds())


def meeting(place: MeetingPlace | None, name: str) -> Meeting | None:
    """None in a single process, and with a line in the log where a run has no store that others can reach."""
    if place is not None and not place.address:
        _log.warning(
            "%s: ranks cannot compare what they read, because the process group has no TCP or file store", name
        )
    return None if place is None or not place.address else Meeting(place, name)
