"""The door of ostris/ai-toolkit."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kohya_bucket.checks import is_first_process
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.ai_toolkit.objects import CACHED
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.ranks import end_run, note_use
from kohya_bucket.trainers.door.seams import SeamGroup

_PACKAGE = "toolkit"
_HOME = f"{_PACKAGE}.data_loader"
_DATASET = "AiToolkitDataset"

logger = logging.getLogger("kohya_bucket")


class _Printed(logging.Handler):
    """Where ai-toolkit's own lines go: it prints, and sets up no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"kohya_bucket: {record.getMessage()}", flush=True)


def _is_enabled(level: int) -> bool:
    """In place of the logger's own: ai-toolkit's captioners, which every job imports, switch off all logging."""
    return level >= logger.getEffectiveLevel()


class AiToolkitDoor(TrainerDoor):
    """What is ai-toolkit's own about its door."""

    trainer, package = "ai-toolkit", _PACKAGE

    def home(self) -> ModuleType | None:
        module = sys.modules.get(_HOME)
        return module if hasattr(module, "get_dataloader_datasets") else None

    def complete(self) -> dict[str, Any]:
        from accelerate import Accelerator

        return {"Accelerator": Accelerator}

    def subjects(self) -> Sequence[SeamGroup]:
        from kohya_bucket.trainers.ai_toolkit.loaders import RunningJob
        from kohya_bucket.trainers.ai_toolkit.seams import SUBJECTS

        self.resume = RunningJob()
        if not logger.hasHandlers():
            logger.addHandler(_Printed())
            logger.setLevel(logging.INFO)
        logger.isEnabledFor = _is_enabled  # type: ignore[method-assign]
        return SUBJECTS

    def check_options(self, options: AdapterOptions) -> None:
        self.refuse_placed(options)

    def is_group(self, dataset: Any) -> bool:
        from torch.utils.data import ConcatDataset

        inner = getattr(dataset, "datasets", None) if isinstance(dataset, ConcatDataset) else None
        return bool(inner) and all(_is_dataset(one) for one in inner or ())

    def planned(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        import torch
        from torch.utils.data import ConcatDataset

        from kohya_bucket.trainers.ai_toolkit.batches import FileItems, PlannedBatches
        from kohya_bucket.trainers.ai_toolkit.loaders import RankSampler
        from kohya_bucket.trainers.door.group import GroupPlanner
        from kohya_bucket.trainers.door.sampler import arguments_over, with_plan

        arguments = arguments_over(ConcatDataset, signature, args, kwargs, batch_size=None)
        if not arguments:
            return self._without_buckets(signature, args, kwargs)
        note_use()
        datasets, options = arguments["dataset"].datasets, self.options()
        cached = any(one.is_caching_latents for one in datasets)
        self.refuse_placed(options, CACHED if cached else "")
        _say_of_caches([item for one in datasets for item in one.file_list])
        items = [FileItems.from_dataset(one) for one in datasets]
        if all(one.dataset_config.is_reg for one in datasets):  # their loader's epochs are not those of the others
            options = options.unscheduled()
        sampler = RankSampler(GroupPlanner(items, options), torch.initial_seed() % 2**31)
        if is_first_process():
            logger.info("%s, %s", sampler.planner.contents("item"), counted(len(sampler), "batch"))
            if any(one.is_caching_latents and one.dataset_config.random_crop for one in datasets):
                logger.warning(
                    "random_crop draws crops at every start, and each is cached: the cache grows with every run"
                )
        arguments["dataset"] = PlannedBatches(datasets, items, options.on_bad_image)
        return with_plan(arguments, sampler, self.in_worker, names={})

    def _without_buckets(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """The arguments as they are, where no dataset has buckets: batches are then drawn of all images alike."""
        arguments: dict[str, Any] = dict(signature.bind(None, *args, **kwargs).arguments)
        if any(one.dataset_config.buckets for one in arguments["dataset"].datasets):
            return None
        if is_first_process():
            logger.warning("buckets is false, so ai-toolkit draws its own batches: every process trains all images")
        return {name: value for name, value in arguments.items() if name != "self"}


def _say_of_caches(items: Sequence[Any]) -> None:
    """What was made anew, and what is left out; the end of the run where nothing is left."""
    from kohya_bucket.trainers.ai_toolkit.latents import made_anew, why_bad

    bad = {str(item.path): why for item in items if (why := why_bad(item))}
    left_out = some([f"{os.path.basename(path)}: {why}" for path, why in sorted(bad.items())], 10)
    if bad and all(map(why_bad, items)):
        end_run(f"nothing can be trained: {left_out}; {_FINER}")
    if not is_first_process():
        return
    if anew := made_anew(items):
        logger.warning(
            "what was cached of %s was made of other files than those that are there now, does not say of which, or "
            "is damaged: it is made anew, and the old files stay in their folders", counted(anew, "item"),
        )  # fmt: skip
    if bad:
        logger.warning("%s left out: %s; %s", counted(len(bad), "item"), left_out, _FINER)


_FINER = "if it is finite in float32, set vae_dtype, or te_dtype for text, under model"


def _is_dataset(dataset: Any) -> bool:
    return any(base.__name__ == _DATASET and base.__module__ == _HOME for base in type(dataset).__mro__)


DOOR = AiToolkitDoor()
