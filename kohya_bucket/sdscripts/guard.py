"""What keeps a run that was started with the adapter from training without it.

These two stand in torch's own classes from the start, whether sd-scripts is known or not, and whichever of its modules
a trainer imports: `ConcatDataset`, which sd-scripts' data set groups are, and `DataLoader`, which they must go through.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from kohya_bucket.adapter.patching import StandIn

__all__ = ["Planned", "end_run", "guards", "is_group"]

logger = logging.getLogger("kohya_bucket")

_TABLES = ("bucket_manager", "buckets_indices", "image_data")
_CLASSES = ("DatasetGroup", "BaseDataset")
_LEFT_ALONE = "MinimalDataset"  # what --dataset_class names: it has no buckets

Plan = Callable[[inspect.Signature, tuple[Any, ...], dict[str, Any]], "dict[str, Any] | None"]


class Planned:
    """What draws batches from a plan."""


def guards(planned: Plan, why_inactive: Callable[[], str]) -> list[StandIn]:
    """What is put into torch's classes.

    Args:
        planned: (signature of `DataLoader.__init__`, its arguments) -> arguments with the plan; None for loaders that
            are not over a trainer's data set group.
        why_inactive: what is wrong, or an empty text while the adapter is in place.
    """
    from torch.utils.data.dataloader import DataLoader
    from torch.utils.data.dataset import ConcatDataset

    make_loader, make_group = DataLoader.__init__, ConcatDataset.__init__
    signature = inspect.signature(make_loader)

    @functools.wraps(make_loader)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = None if why_inactive() else planned(signature, args, kwargs)
        if arguments is not None:
            make_loader(self, **arguments)
            return
        dataset = kwargs.get("dataset", args[0] if args else None)
        if _has_no_buckets(dataset):
            logger.warning("a --dataset_class data set has no buckets to plan: it is trained as sd-scripts does alone")
        if is_group(dataset) and not _holds_plan(signature, args, kwargs):
            end_run(why_inactive() or "this loader is none that a trainer of a known version makes")
        make_loader(self, *args, **kwargs)

    @functools.wraps(make_group)
    def init_group(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_group(self) and why_inactive():
            end_run(why_inactive())
        make_group(self, *args, **kwargs)

    return [StandIn(DataLoader, "__init__", init_loader), StandIn(ConcatDataset, "__init__", init_group)]


def _holds_plan(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a loader is made of another one that has the plan, as accelerate does."""
    given = signature.bind_partial(None, *args, **kwargs).arguments
    found = [given.get("sampler"), given.get("batch_sampler")]
    for sampler in found:  # grows while what samplers are made of is looked at
        if isinstance(sampler, Planned):
            return True
        found += [part for name in ("sampler", "batch_sampler") if (part := getattr(sampler, name, None)) is not None
                  and not any(part is known for known in found)]  # fmt: skip
    return False


def is_group(dataset: Any) -> bool:
    """Whether this is a data set, or group of data sets, of sd-scripts that has buckets."""
    if _has_no_buckets(dataset):
        return False
    members = (dataset, *(getattr(dataset, "datasets", None) or ()))
    return bool(_names(dataset) & set(_CLASSES)) or any(hasattr(member, name) for member in members for name in _TABLES)


def _has_no_buckets(dataset: Any) -> bool:
    return _LEFT_ALONE in _names(dataset)


def _names(dataset: Any) -> set[str]:
    """Names of sd-scripts' classes that an object is of."""
    return {base.__name__ for base in type(dataset).__mro__ if base.__module__.startswith("library.")}


def end_run(why: str) -> NoReturn:
    """One line, and exit code 2."""
    print(
        f"kohya_bucket: {why}. This run was started with kohya_bucket, and would train without it, so it ends here. "
        "Update kohya-bucket; or train without it: leave out `-m kohya_bucket.launch`, or `kohya-bucket patch remove` "
        "the checkout",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(2)
