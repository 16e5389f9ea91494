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


def quiet_worker(then: Callable[[int], Any] | None) -> Callable[[int], None]:
    """A loader's `worker_init_fn` that leaves the memory a forked worker shares untouched, and then calls `then`."""
    return partial(_start_worker, then)


def _start_worker(then: Callable[[int], Any] | None, worker: int) -> None:
    # The garbage collector writes into every object it looks at, which copies its page.
    gc.freeze()
    if then is not None:
        then(worker)


def world_size() -> int:
    """How many processes train together."""
    import torch.distributed

    distributed = torch.distributed
    return int(distributed.get_world_size()) if distributed.is_available() and distributed.is_initialized() else 1
