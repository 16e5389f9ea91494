"""`prepare_loader`: a loader of planned batches behind Hugging Face's accelerate, on one process or many.

`accelerator.prepare` would wrap the batch sampler so that each process takes every W-th batch. It would hide the
sampler's state from torchdata's StatefulDataLoader, drop groups of batches whose last one is not full, and count epochs
from 0 after a resume. Here it is given what needs no wrapper: the batches of this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from kohya_bucket.datasets.agreement import world
from kohya_bucket.datasets.sampler import BucketBatchSampler
from kohya_bucket.errors import PlanError, ResumeError
from kohya_bucket.planning.resume import is_position


def prepare_loader(accelerator: Any, loader: DataLoader[Any]) -> DataLoader[Any]:
    """In place of `accelerator.prepare(loader)`, for a loader whose batch sampler is a `BucketBatchSampler`.

    The loader is accelerate's: it puts batches on the device, and takes part in gradient accumulation, `save_state` and
    `load_state`. Each process reads its own batches of the plan. `set_epoch` of the loader is that of the sampler, also
    after accelerate's `skip_first_batches`.
    After `accelerator.register_for_checkpointing(sampler)`, or with `use_stateful_dataloader=True`, a loaded state goes
    on at the exact image. Preparing the loader once more only makes it known to that accelerator too.

    Raises:
        PlanError: another batch sampler; `split_batches` or `dispatch_batches`; a sampler made for other ranks; one of
            several processes that accelerate takes for the only one.

    Examples:
        >>> from accelerate import Accelerator
        >>> loader = bucketed_loader("photos", KohyaBuckets.for_arch("sd"), batch_size=2)
        >>> loader = prepare_loader(Accelerator(cpu=True), loader)
        >>> len(loader)
        3
    """
    sampler = loader.batch_sampler
    if hasattr(sampler, "planned"):
        registered: DataLoader[Any] = accelerator.prepare_data_loader(loader)  # prepared already: only registers it
        return registered
    _refuse_other_batches(accelerator, sampler)
    if accelerator.num_processes == 1 < (ranks := world()[0]):
        raise PlanError(
            f"this is one of {ranks} processes, and accelerate takes it for the only one, so that no gradients are "
            "exchanged: on processors start it with ACCELERATE_USE_CPU=true"
        )
    from accelerate import data_loader as theirs

    # With several processes accelerate calls its BatchSamplerShard, here `learn_ranks`, to deal batches out to them.
    ranks_known = accelerator.num_processes == 1
    own_batches = _batches_class(theirs)(sampler)

    def learn_ranks(batches: BucketBatchSampler, num_processes: int, process_index: int, **_: Any) -> Any:
        nonlocal ranks_known
        batches.deal_to(num_processes, process_index)
        own_batches.num_processes, own_batches.process_index, ranks_known = num_processes, process_index, True
        return batches

    sampler.accelerated = True
    try:
        with _instead(theirs, BatchSamplerShard=learn_ranks, DataLoaderShard=_loader_class(theirs, own_batches)):
            prepared: DataLoader[Any] = accelerator.prepare_data_loader(loader)
    except BaseException:
        sampler.accelerated = False
        raise
    if not ranks_known or prepared.batch_sampler is not own_batches:
        raise PlanError(
            f"accelerate {version('accelerate')} prepares loaders in a way that is not known here: use a release from "
            "0.30.0 to 1.15.0"
        )
    own_batches.awake = True
    if getattr(prepared, "use_stateful_dataloader", False):
        prepared.load_state_dict({})  # forgets the iterator that was begun to ask for its state
    prepared._is_accelerate_prepared = True
    return prepared


def _refuse_other_batches(accelerator: Any, sampler: Any) -> None:
    if not isinstance(sampler, BucketBatchSampler):
        raise PlanError(
            f"the loader's batch sampler is a {type(sampler).__name__}, not a BucketBatchSampler: give the loader to "
            "accelerator.prepare"
        )
    for option in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, option, None):
            raise PlanError(
                f"accelerate is set to {option}=True, but each process reads the batches that are planned for it: "
                f"leave {option} out, and give BucketBatchSampler the batch size of one process"
            )


@contextmanager
def _instead(module: ModuleType, **others: Any) -> Iterator[None]:
    """Other names in a module for a while: accelerate cannot be told that a batch sampler needs no wrapper."""
    before = {name: getattr(module, name) for name in others}
    vars(module).update(others)
    try:
        yield
    finally:
        vars(module).update(before)


def _batches_class(theirs: ModuleType) -> Any:
    """accelerate's batch sampler of one process, which deals out nothing: its batches are this process's own."""

    class OwnBatches(theirs.BatchSamplerShard):  # type: ignore[name-defined]
        def __init__(self, planned: BucketBatchSampler) -> None:
            super().__init__(planned, 1, 0, False, True)
            self.planned = self.sampler = planned
            self.awake = False  # yields nothing while the loader is prepared, which may begin an iterator
            self.counted = False  # in a pass of `Prepared`, which counts what it hands out

        def __len__(self) -> int:
            return len(self.planned)

        @property
        def total_length(self) -> int:
            """Batches of all processes."""
            return len(self.planned) * int(self.num_processes)

        def __iter__(self) -> Iterator[list[int]]:
            batches: Iterator[list[int]] = self.planned._own_batches() if self.awake else iter(())
            if self.counted:
                self.planned.handed_out = 0
            return batches

        def set_epoch(self, epoch: int) -> None:
            self.planned.set_epoch(epoch)

        def state_dict(self) -> dict[str, Any]:
            """What was read, since accelerate's loader knows how far it is ahead."""
            return self.planned.state_as_read()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            """Does nothing: `Prepared` has loaded the position; here, at the first batch, it would undo a set_epoch."""

    return OwnBatches


def _loader_class(theirs: ModuleType, own_batches: Any) -> type:
    """accelerate's loader, for one sampler."""
    sampler: BucketBatchSampler = own_batches.planned

    class Prepared(theirs.DataLoaderShard):  # type: ignore[name-defined]
        def __init__(self, *arguments: Any, batch_sampler: Any, **options: Any) -> None:
            # `_drop_last`: gather_for_metrics keeps all, since nothing was added to fill a last batch.
            super().__init__(*arguments, batch_sampler=own_batches, **{**options, "_drop_last": True})

        @property
        def iteration(self) -> int:
            """The epoch, which the sampler counts: accelerate's own count begins at 0 in every program."""
            return sampler.epoch

        @iteration.setter
        def iteration(self, count: int) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            own_batches.counted = True
            try:
                for trained, batch in enumerate(super().__iter__(), 1):
                    sampler.handed_out = trained
                    yield batch
            finally:
                own_batches.counted = False

        def adjust_state_dict_for_prefetch(self) -> None:
            """Adjust nothing: what is read is this process's own, and releases until 1.12 take W - 1 batches off."""

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({} if state.get("_iterator_finished") else state)
            if state:
                sampler.load_state_dict(_position_in(state))
                self.dl_state_dict = state

    return Prepared


def _position_in(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sampler's part of a loader's state, wherever torchdata keeps it."""
    waiting: list[Any] = [state]
    while waiting:
        part = waiting.pop()
        if is_position(part):
            return part  # type: ignore[no-any-return]
        if isinstance(part, Mapping):
            waiting += part.values()
    raise ResumeError(
        "the saved state of the loader holds no position in a plan: it is that of a loader which prepare_loader has "
        "not prepared. Go on with load_state_dict of the sampler, or start the epoch again with its set_epoch"
    )
