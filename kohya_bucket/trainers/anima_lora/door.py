"""The door of sorryhyun/anima_lora."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

from kohya_bucket.checks import is_first_process
from kohya_bucket.trainers.door.door import TrainerDoor
from kohya_bucket.trainers.door.options import TABLE, AdapterOptions
from kohya_bucket.trainers.door.seams import SeamGroup
from kohya_bucket.trainers.sdscripts.checkout import runs_anima_lora

_PACKAGE = "library"
_HOME = f"{_PACKAGE}.datasets.group"
_CLASSES = {"BaseDataset", "DatasetGroup"}

logger = logging.getLogger("kohya_bucket")


class AnimaLoraDoor(TrainerDoor):
    """What is anima_lora's own about its door."""

    trainer, package = "anima_lora", _PACKAGE
    _table: Any = None

    def home(self) -> ModuleType | None:
        module = sys.modules.get(_HOME)
        if module is None or not hasattr(module, "DatasetGroup"):
            return None
        return module if runs_anima_lora() else None

    def complete(self) -> dict[str, Any]:
        from accelerate import Accelerator

        for name in ("config.loader", "config.io", "datasets.collator"):
            importlib.import_module(f"{_PACKAGE}.{name}")
        return {"Accelerator": Accelerator}

    def subjects(self) -> Sequence[SeamGroup]:
        from kohya_bucket.trainers.anima_lora.resuming import Resume
        from kohya_bucket.trainers.anima_lora.seams import SUBJECTS

        self.resume = Resume()
        self.defaults = {"largest_first": True}  # as the trainer does: all shapes are compiled at once
        return SUBJECTS

    def read_options(self, user_config: dict[str, Any], frame: FrameType) -> dict[str, Any]:
        """The table may stand in any file of a run's configs; the one that is read last counts."""
        self._table = user_config.get(TABLE, self._table)
        arguments = frame.f_locals.get("argparse_namespace")
        if arguments is not None:
            self.resume.arguments = arguments
            if getattr(arguments, "torch_compile", False):
                self.defaults = self.defaults | {"remainder": "pad"}  # other sizes of a batch are compiled too
        return super().read_options(user_config if self._table is None else user_config | {TABLE: self._table}, frame)

    def check_options(self, options: AdapterOptions) -> None:
        self.refuse_placed(options)

    def is_group(self, dataset: Any) -> bool:
        modules = f"{_PACKAGE}.datasets."
        named = [base for base in type(dataset).__mro__ if base.__name__ in _CLASSES]
        return any(base.__module__.startswith(modules) for base in named) and runs_anima_lora()

    def planned(self, signature: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
        from kohya_bucket.trainers.anima_lora.batches import HELD, Held, Images
        from kohya_bucket.trainers.door.group import GroupPlanner
        from kohya_bucket.trainers.door.sampler import PlanSampler, arguments_over, with_plan

        arguments = arguments_over(self.owners.named("DatasetGroup"), signature, args, kwargs)
        collator: Any = arguments.get("collate_fn")
        if not arguments or not hasattr(collator, "current_epoch"):
            return None
        group, training, options = arguments["dataset"], bool(arguments.get("shuffle")), self.options()
        records = [record for one in group.datasets for record in one.image_data.values()]
        held = any(record.latents is not None or record.latents_npz is not None for record in records)
        self.refuse_placed(options, "use_vae_cache" if held else "")
        if not training:
            options = options.for_validation()
        images = [Images.from_dataset(one) for one in group.datasets]
        planner = GroupPlanner(images, options)
        sampler = PlanSampler.told_by(collator, planner, int(group.datasets[0].seed), training=training)
        setattr(group, HELD, Held(images, options.on_bad_image))
        if training:
            self.resume.attach(sampler)
            if is_first_process():
                logger.info(
                    "%s, remainder = '%s', whatever anima_lora has said of batches that are not full",
                    planner.contents("image"), options.remainder,
                )  # fmt: skip
        return with_plan(arguments, sampler, self.in_worker)


DOOR = AnimaLoraDoor()
