"""What keeps a run that was started with the adapter from training without it.

The guards stand in torch's own classes from the start, whether the trainer is known or not, and whichever of its
modules it imports: in `ConcatDataset`, which groups of datasets are, and in `DataLoader`, which they must go through.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kohya_bucket.trainers.door.patching import Patches, Replacement
from kohya_bucket.trainers.door.ranks import exit_with_message, note_use

if TYPE_CHECKING:
    from kohya_bucket.trainers.door.door import TrainerDoor


_doors: list[TrainerDoor] = []
_patches = Patches()


class Planned:
    """What draws batches from a plan."""


def watch(door: TrainerDoor) -> None:
    """Guard torch's classes for this door too; one replacement serves all doors, in whatever order they are closed."""
    if door not in _doors:
        _doors.append(door)
    if not _patches:
        _patches.apply(_replacements(), lambda _: False)


def watch_no_longer(door: TrainerDoor) -> None:
    """Torch's classes as they were, once no door is left."""
    if door in _doors:
        _doors.remove(door)
    if not _doors:
        _patches.take_back()


def _replacements() -> list[Replacement]:
    from torch.utils.data.dataloader import DataLoader
    from torch.utils.data.dataset import ConcatDataset

    make_loader: Callable[..., None] = DataLoader.__init__
    make_group: Callable[..., None] = ConcatDataset.__init__
    signature = inspect.signature(make_loader)

    @functools.wraps(make_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        for door in _doors_of(kwargs.get("dataset", args[0] if args else None)):
            with exit_with_message():
                arguments = None if door.why_inactive() else door.planned(signature, args, kwargs)
            if arguments is not None:
                make_loader(self, **arguments)
                return
            if not _holds_plan(signature, args, kwargs):
                door.end(door.why_inactive() or "no known version of the trainer makes such a loader")
        make_loader(self, *args, **kwargs)

    @functools.wraps(make_group)
    def init_group(self: Any, *args: Any, **kwargs: Any) -> None:
        for door in _doors_of(self):
            if door.why_inactive():
                door.end(door.why_inactive())
        make_group(self, *args, **kwargs)
        for door in _doors_of(self):
            note_use()
            door.look_at(self)

    return [Replacement(DataLoader, "__init__", init_loader), Replacement(ConcatDataset, "__init__", init_group)]


def _doors_of(dataset: Any) -> list[TrainerDoor]:
    return [door for door in _doors if door.is_group(dataset)]


def _holds_plan(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    """Whether a loader is made of another one that has the plan, as accelerate does."""
    arguments = signature.bind_partial(None, *args, **kwargs).arguments
    samplers = [arguments.get("sampler"), arguments.get("batch_sampler")]
    for sampler in samplers:  # grows while what samplers are made of is looked at
        if isinstance(sampler, Planned):
            return True
        inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
        samplers += [part for part in inner if part is not None and not any(part is seen for seen in samplers)]
    return False
