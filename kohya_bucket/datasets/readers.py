"""Loaders of other libraries that deal batches out, leave some out or count epochs, and tell a batch sampler nothing.

Who reads a sampler is on the stack, in whatever order a library makes iterators, asks for states and begins to read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from kohya_bucket.errors import PlanError

_PREPARE = "prepare the loader with kohya_bucket.prepare_loader(accelerator, loader)"


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def dataset_being_read() -> Any:
    """What the loader that reads now loads from; None without one of torch's."""
    readers = (frame.f_locals.get("self") for frame in _callers())
    return next((one._dataset for one in readers if isinstance(one, _BaseDataLoaderIter)), None)


def refuse_another_deal(sampler: Any, *, fresh: bool) -> None:
    """Refuse a reader that would not train what the sampler deals out now.

    Args:
        sampler: which is about to be read.
        fresh: nobody has named an epoch or loaded a position, and nothing was read: the sampler is at epoch 0.

    Raises:
        PlanError: accelerate's own loader or batch sampler, which `accelerator.prepare` makes: it would deal a rank's
            batches out once more, and counts its epochs from 0 in every program. A fresh sampler, where batches are
            left out by accelerate's `skip_first_batches`, or where transformers' Trainer is in a later epoch.
    """
    loaders, trainers = (sys.modules.get(name) for name in ("accelerate.data_loader", "transformers.trainer"))
    skip = None if loaders is None else loaders.SkipBatchSampler.__iter__.__code__
    skipped, trainer = False, None
    for frame in _callers():
        if frame.f_code is skip:
            skipped = True
        elif loaders is not None and frame.f_globals is vars(loaders):
            raise PlanError(
                "accelerator.prepare would deal out a second time what this sampler has dealt out to the processes: "
                f"{_PREPARE}"
            )
        elif fresh and trainer is None and trainers is not None and frame.f_globals is vars(trainers):
            trainer = frame.f_locals.get("self")
    if trainer is not None:
        skipped = _trains(trainer, sampler) and (trainer.state.epoch or 0) >= 1
    if fresh and skipped:
        raise PlanError(
            "a run is resumed, but the sampler was not told in which epoch, and would begin with epoch 0: "
            f"{_PREPARE}, or call the sampler's set_epoch or load_state_dict before its first batch"
        )


def _trains(trainer: Any, sampler: Any) -> bool:
    """Whether it is the sampler of a Trainer's loader for training; one for evaluation begins with epoch 0."""
    loader = getattr(getattr(trainer, "callback_handler", None), "train_dataloader", None)
    return getattr(loader, "batch_sampler", None) is sampler


def let_count_on(sampler: Any) -> None:
    """Where torchdata's `SamplerWrapper` has the sampler load the end of an epoch, let both go on to its next epoch.

    The wrapper counts epochs itself, and has not yet counted the one that ended.

    Raises:
        PlanError: behind an `Unbatcher` (`prebatch`), which would leave batches out of the next epoch, or save the
            state of this end again and again.
    """
    nodes = sys.modules.get("torchdata.nodes")
    if nodes is None:
        return
    wrapper, handed_out = None, 0
    for frame in _callers():
        if frame.f_code is nodes.SamplerWrapper.reset.__code__:
            wrapper = frame.f_locals["self"]
        elif frame.f_code is nodes.Unbatcher.reset.__code__:
            handed_out = frame.f_locals["initial_state"][nodes.Unbatcher.BATCH_IDX_KEY]
    if wrapper is None:
        return
    ended = wrapper.epoch != sampler.epoch
    if handed_out and (ended or handed_out >= sampler.plan().steps):
        raise PlanError(
            f"this state was saved at the end of epoch {wrapper.epoch}, from which torchdata's nodes with prebatch do "
            f"not go on right: begin the next one with SamplerWrapper(sampler, initial_epoch={wrapper.epoch + 1})"
        )
    if ended:
        wrapper.epoch = wrapper.epoch_updater(wrapper.epoch)
        sampler.set_epoch(wrapper.epoch)
