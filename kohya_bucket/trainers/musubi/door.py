"""The door of kohya-ss/musubi-tuner."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.ranks import end_run, exit_with_message
from kohya_bucket.trainers.door.seams import SeamGroup
from kohya_bucket.trainers.musubi.refusals import check_options

_PACKAGE = "musubi_tuner"
_HOME = f"{_PACKAGE}.dataset.image_video_dataset"
_CLASSES = {"BaseDataset", "DatasetGroup"}
_COUNTS_ANEW = (
    "the trainer itself counts steps and epochs from 0 again: the rest of epoch {epoch} is its first epoch, and "
    "--max_train_epochs and --max_train_steps are those of this run alone"
)

logger = logging.getLogger("kohya_bucket")


class MusubiDoor(TrainerDoor):
    """What is musubi-tuner's own about its door."""

    trainer, package = "musubi-tuner", _PACKAGE

    def home(self) -> ModuleType | None:
        module = sys.modules.get(_HOME)
        return module if hasattr(module, "DatasetGroup") else None

    def complete(self) -> dict[str, Any]:
        from accelerate import Accelerator

        importlib.import_module(f"{_PACKAGE}.dataset.config_utils")
        program = Path(sys.argv[0]).stem
        if "cache" in program:  # what it caches with it will import next
            with suppress(ImportError):
                loop = "cache_text_encoder_outputs" if "text" in program else "cache_latents"
                importlib.import_module(f"{_PACKAGE}.{loop}")
        with suppress(ImportError):  # a version without it
            importlib.import_module(f"{_PACKAGE}.qwen_image.qwen_image_autoencoder_kl")
        return {"Accelerator": Accelerator}

    def subjects(self) -> Sequence[SeamGroup]:
        from kohya_bucket.trainers.door.resume import ResumeHooks
        from kohya_bucket.trainers.musubi.seams import SUBJECTS

        self.resume = ResumeHooks(_COUNTS_ANEW)
        return SUBJECTS

    def check_options(self, options: AdapterOptions) -> None:
        check_options(options)
        if options.focus and "caching" in self.unknown:
            raise ConfigError(
                "[kohya_bucket] focus needs a part of musubi-tuner that looks different from every known version: "
                f"{self.unknown['caching']}. Leave it out, or update kohya-bucket"
            )

    def is_group(self, dataset: Any) -> bool:
        return any(base.__name__ in _CLASSES and base.__module__ == _HOME for base in type(dataset).__mro__)

    def look_at(self, group: Any) -> None:
        from kohya_bucket.trainers.door.placed import focus_of
        from kohya_bucket.trainers.door.placing import refuse_unmatched
        from kohya_bucket.trainers.musubi.items import table_of

        options = self.options()
        listed = [one for one in group.datasets if hasattr(one, "datasource")] if options.focus else []
        with exit_with_message():
            focuses = [focus_of(options, [source.key for source in table_of(one).sources]) for one in listed]
            refuse_unmatched(options, focuses)

    def planned(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        from kohya_bucket.trainers.door.group import GroupPlanner
        from kohya_bucket.trainers.door.sampler import PlanSampler, arguments_over, with_plan
        from kohya_bucket.trainers.musubi.batches import HELD, CachedItems, Held, TimestepPool

        arguments = arguments_over(self.owners.named("DatasetGroup"), signature, args, kwargs)
        if not arguments:
            return None
        group, collator = arguments["dataset"], arguments.get("collate_fn")
        counter = getattr(collator, "current_epoch", None)
        datasets: list[Any] = group.datasets
        if counter is None or not datasets or any(getattr(one, "batch_manager", None) is None for one in datasets):
            return None
        items = [CachedItems.from_dataset(one) for one in datasets]
        if not any(len(one.items) for one in items):
            end_run("there is no cached item to train: run cache_latents.py and cache_text_encoder_outputs.py first")
        sampler = PlanSampler(GroupPlanner(items, self.options()), int(group.datasets[0].seed), counter)
        pool = TimestepPool(len(sampler) * sampler.largest_batch, sampler.largest_batch)
        setattr(group, HELD, Held(items, pool, self.options().on_bad_image))
        self.resume.attach(sampler)
        if is_first_process():
            logger.info("%s", sampler.planner.contents("item"))
        return {**with_plan(arguments, sampler, self.in_worker), "collate_fn": _first}


def _first(examples: list[Any]) -> Any:
    """In place of the trainer's collator, which insists on an epoch that its datasets count themselves."""
    return examples[0]


DOOR = MusubiDoor()
