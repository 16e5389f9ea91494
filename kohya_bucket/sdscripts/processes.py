"""What a process of the run is, and how it starts."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

__all__ = ["collector_paused", "is_first_process", "quiet_worker", "world_size"]


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


def quiet_worker(then: Callable[[int], Any] | None, prepare: Callable[[], None]) -> Callable[[int], None]:
    """A loader's `worker_init_fn` that leaves the memory a forked worker shares untouched.

    Args:
        then: the trainer's own, called last.
        prepare: called first: a spawned worker has imported the trainer's modules afresh.
    """
    return partial(_start_worker, then, prepare)


def _start_worker(then: Callable[[int], Any] | None, prepare: Callable[[], None], worker: int) -> None:
    prepare()
    # The garbage collector writes into every object it looks at, which copies its page.
    gc.freeze()
    if then is not None:
        then(worker)


def world_size() -> int:
    """How many processes train together."""
    import torch.distributed

    distributed = torch.distributed
    return int(distributed.get_world_size()) if distributed.is_available() and distributed.is_initialized() else 1
