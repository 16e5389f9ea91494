"""Images weigh the same on any number of GPUs through the batch's `loss_weights`; not every trainer heeds them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.sampler import PlanSampler

__all__ = ["say_what_is_not_weighed", "weighed"]

_KEY = "loss_weights"

logger = logging.getLogger("kohya_bucket")


def weighed(batch: dict[str, object], scale: float) -> dict[str, object]:
    """The batch with its loss multiplied by `scale`: see `EpochPlan.loss_scale`."""
    weights = batch[_KEY]
    return batch if scale == 1 else batch | {_KEY: weights * scale}  # type: ignore[operator]  # a tensor


def say_what_is_not_weighed(sampler: PlanSampler) -> None:
    """Warn where ranks of a step train unequal numbers of images and the trainer takes the mean of each rank's."""
    unequal = sampler.unequal_steps
    if unequal and is_first_process() and not _trainer_heeds_weights():
        logger.warning(
            "%d of %d steps leave GPUs with unequal numbers of images, and this trainer ignores loss_weights: "
            "images on the GPU with fewer count for more; remainder = 'pad' makes the numbers equal",
            unequal,
            len(sampler) // sampler.world_size,
        )


def _trainer_heeds_weights() -> bool:
    """Whether the program that runs, or one that it is built on, reads the weights of its batches.

    sd-scripts' programs lie beside its `library`; `sdxl_train.py` and `fine_tune.py` do not read them.
    """
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    if program is None:
        return True
    folder = Path(program).resolve().parent
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    here = {Path(file).resolve() for file in files if file and Path(file).suffix == ".py"}
    trainers = [file for file in here if file.parent == folder and file.is_file()]  # torch names one that is none
    return any(_KEY in file.read_text(encoding="utf-8", errors="replace") for file in trainers)
