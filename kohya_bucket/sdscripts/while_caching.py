"""What both kinds of caching need: methods of sd-scripts' objects replaced for a while, and patience."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed

__all__ = ["replaced", "wait_for_ranks"]


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


def wait_for_ranks() -> None:
    """Wait for all processes, for hours if need be: a collective operation would give up after its time-out."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    _waits["caching"] += 1
    key = f"kohya_bucket/caching/{_waits['caching']}"
    store = distributed.distributed_c10d._get_default_store()
    store.add(key, 1)
    while store.add(key, 0) < distributed.get_world_size():
        time.sleep(0.1)
