"""What both kinds of caching need: methods of sd-scripts' objects replaced for a while, and patience."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed

from kohya_bucket.errors import KohyaBucketError

__all__ = ["replaced", "told_to_ranks", "wait_for_ranks"]


@contextmanager
def replaced(owner: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


_waits: Counter[str] = Counter()
_STOPPED = "kohya_bucket/caching/stopped"


def wait_for_ranks() -> None:
    """Wait for all processes, for hours if need be: a collective operation would give up after its time-out.

    Raises:
        KohyaBucketError: another process ended within `told_to_ranks`.
    """
    store, ranks = _store_and_ranks()
    if store is None:
        return
    _waits["caching"] += 1
    key = f"kohya_bucket/caching/{_waits['caching']}"
    store.add(key, 1)
    while store.add(key, 0) < ranks:
        if store.add(_STOPPED, 0):
            raise KohyaBucketError(
                "another process of this run ended while it cached, so this one does too: see its log"
            )
        time.sleep(0.1)


@contextmanager
def told_to_ranks() -> Iterator[None]:
    """What ends the work of this process ends the waiting of the others, on other machines too."""
    try:
        yield
    except BaseException:
        store, _ = _store_and_ranks()
        if store is not None:
            with suppress(RuntimeError):  # the process that keeps it may be the one that ended
                store.add(_STOPPED, 1)
        raise


def _store_and_ranks() -> tuple[Any, int]:
    """What the processes of a run share, and their number; None where there is one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None, 1
    return distributed.distributed_c10d._get_default_store(), distributed.get_world_size()
