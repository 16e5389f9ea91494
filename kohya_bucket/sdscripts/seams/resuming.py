"""The accelerator, whose states remember the place in an epoch."""

from __future__ import annotations

from typing import Any, Protocol

from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Owners, Place, Seam, Subject, calling_frame
from kohya_bucket.adapter.shapes import Offers, Takes
from kohya_bucket.sdscripts.resuming.initial_step import is_known

__all__ = ["RESUMING", "Accelerator"]


class Accelerator(Protocol):
    """accelerate's, as far as states are concerned."""

    step: int

    def register_save_state_pre_hook(self, hook: Any) -> Any: ...

    def register_load_state_pre_hook(self, hook: Any) -> Any: ...

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any: ...


def _prepare_accelerator(place: Place, args: Any, **more: Any) -> Any:
    resume = place.door.resume
    with exit_with_message():
        resume.take_arguments(args, counts=is_known(args, calling_frame()))
    accelerator: Accelerator = place.original(args, **more)
    resume.watch(accelerator)
    return accelerator


def _seams(owners: Owners) -> tuple[Seam, ...]:
    return (
        Seam("prepare_accelerator", (), _prepare_accelerator),
        Seam("Accelerator", (Offers(Accelerator),)),
        Seam("Accelerator.skip_first_batches", (Takes("dataloader", "num_batches"),)),
    )


RESUMING = Subject("resuming", "a run that is resumed goes on by sd-scripts' own count", _seams)
