"""What a process of the run is, and how it starts."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from kohya_bucket.adapter.bad_images import BadImages
from kohya_bucket.errors import KohyaBucketError

__all__ = [
    "collector_paused",
    "is_first_process",
    "quiet_worker",
    "rank",
    "stop_all_ranks_on_error",
    "wait_for_ranks",
    "world_size",
]


def is_first_process() -> bool:
    """Whether this is rank 0, the process that speaks (the launchers say so in the environment)."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Make many objects that will stay, without Python looking through all of them again and again meanwhile."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def quiet_worker(
    then: Callable[[int], Any] | None, prepare: Callable[[], None], bad_images: BadImages
) -> Callable[[int], None]:
    """A loader's `worker_init_fn` that leaves the memory a forked worker shares untouched.

    Args:
        then: the trainer's own, called last.
        prepare: called first: a spawned worker has imported the trainer's modules afresh.
        bad_images: where the worker counts what it cannot read.
    """
    return partial(_start_worker, then, prepare, bad_images)


def _start_worker(
    then: Callable[[int], Any] | None, prepare: Callable[[], None], bad_images: BadImages, worker: int
) -> None:
    prepare()
    bad_images.count_here()
    # The garbage collector writes into every object it looks at, which copies its page.
    gc.freeze()
    if then is not None:
        then(worker)


def world_size() -> int:
    """How many processes train together."""
    return _of_group("get_world_size", 1)


def rank() -> int:
    """Which of them this one is."""
    return _of_group("get_rank", 0)


def _of_group(question: str, alone: int) -> int:
    import torch.distributed

    distributed = torch.distributed
    return (
        int(getattr(distributed, question)()) if distributed.is_available() and distributed.is_initialized() else alone
    )


_waits: Counter[str] = Counter()

_STOPPED = "kohya_bucket/caching/stopped"


def wait_for_ranks() -> None:
    """Wait for all processes, for hours if need be: a collective operation would give up after its time-out.

    Raises:
        KohyaBucketError: another process ended within `stop_all_ranks_on_error`.
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
def stop_all_ranks_on_error() -> Iterator[None]:
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
    import torch.distributed

    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return None, 1
    return distributed.distributed_c10d._get_default_store(), distributed.get_world_size()
