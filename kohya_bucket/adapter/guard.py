"""What keeps a run that was started with the adapter from training without it.

These two stand in torch's own classes from the start, whether the trainer is known or not, and whichever of its modules
it imports: `ConcatDataset`, which groups of data sets are, and `DataLoader`, which they must go through.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from kohya_bucket.adapter.patching import Patches, Replacement
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import one_line

__all__ = ["Planned", "Watched", "end_run", "exit_with_message", "watch", "watch_no_longer"]

_doors: list[Watched] = []
_patches = Patches()


class Planned:
    """What draws batches from a plan."""


class Watched(Protocol):
    """What the guards ask of a door."""

    def is_group(self, dataset: Any) -> bool:
        """Whether this is a data set, or group of data sets, that the trainer would train from."""
        ...

    def planned(self, signature: inspect.Signature, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments of a `DataLoader` call with the plan; None where it is not a trainer's."""
        ...

    def look_at(self, group: Any) -> None:
        """A group was made: end the run where it cannot be trained."""
        ...

    def why_inactive(self) -> str:
        """What is wrong, or an empty text while the adapter is in place."""
        ...

    def end(self, why: str) -> NoReturn:
        """End the run with one line."""
        ...


def watch(door: Watched) -> None:
    """Guard torch's classes for this door too; one replacement serves all doors, in whatever order they are closed."""
    if door not in _doors:
        _doors.append(door)
    if not _patches:
        _patches.apply(_replacements(), lambda _: False)


def watch_no_longer(door: Watched) -> None:
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
            door.look_at(self)

    return [Replacement(DataLoader, "__init__", init_loader), Replacement(ConcatDataset, "__init__", init_group)]


def _doors_of(dataset: Any) -> list[Watched]:
    return [door for door in _doors if door.is_group(dataset)]


def end_run(line: str) -> NoReturn:
    """One line, and exit code 2."""
    print(f"kohya_bucket: {one_line(line)}", file=sys.stderr, flush=True)
    raise SystemExit(2)


@contextmanager
def exit_with_message() -> Iterator[None]:
    """What a user can mend ends the run with one line, not with a traceback through the trainer.

    From a loader's worker, torch brings it to the trainer's process; of one that exits, it would know nothing.
    """
    try:
        yield
    except KohyaBucketError as error:
        torch_data = sys.modules.get("torch.utils.data")
        if torch_data is not None and torch_data.get_worker_info() is not None:
            raise
        raise SystemExit(f"kohya_bucket: {one_line(error)}") from error


def _holds_plan(signature: inspect.Signature, args: Any, kwargs: Any) -> bool:
    """Whether a loader is made of another one that has the plan, as accelerate does."""
    given = signature.bind_partial(None, *args, **kwargs).arguments
    found = [given.get("sampler"), given.get("batch_sampler")]
    for sampler in found:  # grows while what samplers are made of is looked at
        if isinstance(sampler, Planned):
            return True
        inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
        found += [part for part in inner if part is not None and not any(part is known for known in found)]
    return False
