"""`install()` and `uninstall()`: the door of kohya-ss/sd-scripts. Calling `install()` again changes nothing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.ranks import warn_once
from kohya_bucket.trainers.door.seams import SeamGroup
from kohya_bucket.trainers.sdscripts.checkout import SeamError, describe_folder, runs_anima_lora

_PACKAGE = "library"  # other projects have packages of this name too
_HOME = "BaseDataset"
_METHODS = ("make_buckets", "shuffle_buckets", "register_image")  # any of them tells it from another project's
_CLASSES = {_HOME, "DatasetGroup"}
_TABLES = ("bucket_manager", "buckets_indices", "image_data")  # any two: another project's may have one of them
_WITHOUT_BUCKETS = "MinimalDataset"  # what --dataset_class names


class SdScriptsDoor(TrainerDoor):
    """What is sd-scripts' own about its door."""

    trainer, package, needed = "sd-scripts", _PACKAGE, " (it needs 0.10.1 or newer)"

    def home(self) -> ModuleType | None:
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{_PACKAGE}.") and isinstance(module, ModuleType):
                base = vars(module).get(_HOME)
                if getattr(base, "__module__", None) == name and any(hasattr(base, method) for method in _METHODS):
                    return None if runs_anima_lora() else module
        return None

    def complete(self) -> dict[str, Any]:
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

        for name in ("config_util", "train_util"):  # with them everything else is imported
            if importlib.util.find_spec(f"{_PACKAGE}.{name}") is not None:
                importlib.import_module(f"{_PACKAGE}.{name}")
        return {"Accelerator": Accelerator, "DataLoader": DataLoader}

    def subjects(self) -> Sequence[SeamGroup]:
        from kohya_bucket.trainers.sdscripts.resuming import TrainerResume
        from kohya_bucket.trainers.sdscripts.seams import SUBJECTS

        self.resume = TrainerResume()
        return SUBJECTS

    def check_options(self, options: AdapterOptions) -> None:
        from kohya_bucket.trainers.sdscripts.refusals import refuse_what_needs

        refuse_what_needs(self.unknown, options)

    def is_group(self, dataset: Any) -> bool:
        if runs_anima_lora():
            return False
        names = {base.__name__ for base in type(dataset).__mro__ if base.__module__.startswith(f"{_PACKAGE}.")}
        if _WITHOUT_BUCKETS in names:
            warn_once("a --dataset_class dataset has no buckets to plan: sd-scripts trains it alone")
            return False
        members = (dataset, *(getattr(dataset, "datasets", None) or ()))
        return bool(names & _CLASSES) or any(sum(hasattr(one, table) for table in _TABLES) > 1 for one in members)

    def look_at(self, group: Any) -> None:
        from kohya_bucket.trainers.sdscripts.refusals import refuse_empty

        refuse_empty(group)

    def planned(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        from kohya_bucket.trainers.sdscripts.batches import planned_arguments

        return planned_arguments(self, signature, args, kwargs)

    def describe(self) -> str:
        return describe_folder(self.root)


def install(*, quiet: bool = False, at_once: bool = False) -> None:
    """Put this package's buckets and plans behind sd-scripts' dataset classes.

    From then on no dataset group of sd-scripts reaches a loader without the plan: a run that would train without it
    ends with one line and exit code 2.

    Args:
        quiet: do not list the replaced seams in the log.
        at_once: end the process as soon as sd-scripts turns out to be unknown, not only when it is about to train.

    Raises:
        SeamError: sd-scripts is imported already and is not a version this adapter knows.
    """
    DOOR.open(quiet=quiet, at_once=at_once)
    if DOOR.refusal:
        raise SeamError(f"{DOOR.refusal}. Update kohya-bucket, or train without it")


DOOR = SdScriptsDoor()

uninstall, is_active, why_inactive = DOOR.close, DOOR.is_active, DOOR.why_inactive
left_alone = DOOR.left_alone
