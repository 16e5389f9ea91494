"""Who is reading the batches: a plain loader, or one that accelerate has prepared.

`accelerator.prepare` wraps a batch sampler so that rank r of W takes every W-th batch, and drops a group of W
batches whose last one is not full. It tells the sampler nothing of this, neither by a call nor by an argument.
So the sampler looks up the call stack, once per epoch, for accelerate's wrapper, and hands it what it expects:
the batches of all ranks, in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kohya_bucket.errors import PlanError

__all__ = ["called_by_accelerate_loop", "reading_shard", "refuse_untold_steps"]

_MODULE = "accelerate.data_loader"


def reading_shard() -> Any | None:
    """accelerate's `BatchSamplerShard` that is calling now, or None.

    Raises:
        PlanError: accelerate is to split each batch, or to read all batches in one process: both would tear
            apart what was planned for a rank.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    for caller in _callers():
        if isinstance(caller, module.BatchSamplerShard):
            if caller.split_batches and caller.num_processes > 1:
                raise PlanError(
                    "accelerate is set to split_batches=True, but every rank's batch is planned already: use "
                    "split_batches=False and give the batch size of one rank"
                )
            return caller
        if type(caller).__name__ == "DataLoaderDispatcher" and caller.state.num_processes > 1:
            raise PlanError(
                "accelerate is set to dispatch_batches=True, which reads all batches in one process: use "
                "dispatch_batches=False, so that every rank reads its own"
            )
    return None


def called_by_accelerate_loop() -> bool:
    """Whether accelerate's loader is calling on its own account, at the start of an iteration."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return False
    return any(frame.f_code.co_name == "__iter__" and _module_of(frame) == _MODULE for frame in _frames())


def refuse_untold_steps() -> None:
    """For a position in the middle of an epoch that accelerate's loader reads, which is ahead of training.

    Raises:
        PlanError: unless torchdata asks, which keeps account of what it read.
    """
    if any(_module_of(frame).startswith("torchdata.") for frame in _frames()):
        return
    raise PlanError(
        "accelerate's loader has read more steps than are trained, so this position would miss images after a resume: "
        "save state_dict(step=…) with the steps of this epoch that are trained, which register_for_checkpointing "
        "does not do, or set use_stateful_dataloader=True and let accelerate save the loader"
    )


def _callers() -> Iterator[Any]:
    """The objects of accelerate whose methods are running, the innermost first."""
    for frame in _frames():
        if _module_of(frame) == _MODULE and "self" in frame.f_locals:
            yield frame.f_locals["self"]


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _frames() -> Iterator[FrameType]:
    """The calls that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
