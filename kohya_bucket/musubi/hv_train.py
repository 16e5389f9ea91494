"""What `hv_train.py` lacks to train at all; every other trainer's batches are handed over as they are.

It was not changed along with the data sets: it tells them of no epoch, calls its collator with a step that its own
definition does not take, takes a batch for four tensors, and saves with options that its parser does not have.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

from kohya_bucket.adapter.patching import Replacement
from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.adapter.seams import Door
from kohya_bucket.adapter.shapes import parameters_of

__all__ = ["handing_over", "mend"]

_COLLATOR = "collator_class"
_PARTS = ("latents", "llm", "llm_mask", "clipL")
_SAVES_WITH = ("metadata_reso", "metadata_arch")

logger = logging.getLogger("kohya_bucket")


def handing_over(collator: Any) -> Any:
    """What replaces a trainer's collator, which insists on an epoch that its data sets count themselves."""
    return _parts_of_first if getattr(collator, "takes_parts", False) else _first


def mend(program: FrameType, door: Door) -> None:
    """Mend a program that asks for its data sets without telling them of an epoch; others are left as they are.

    Args:
        program: where it asks.
        door: remembers what was there.
    """
    module = sys.modules.get(program.f_globals["__name__"])
    own = getattr(module, _COLLATOR, None)
    if module is None or getattr(own, "__module__", "") != module.__name__ or _taken_by(own) != ["epoch", "dataset"]:
        return
    door.patches.apply([Replacement(module, _COLLATOR, _WithStep)], lambda _: False)
    arguments = program.f_locals.get("args")
    for name in _SAVES_WITH:
        if arguments is not None and not hasattr(arguments, name):
            setattr(arguments, name, None)


class _WithStep:
    """In place of a collator that a program defines without the step, and may call with it."""

    def __init__(self, epoch: Any, *step_and_dataset: Any) -> None:
        self.current_epoch = epoch
        self.takes_parts = len(step_and_dataset) > 1
        if self.takes_parts and is_first_process():
            logger.info("hv_train.py is mended: its collator, its batches, and the options that it saves with")


def _first(examples: list[Any]) -> Any:
    return examples[0]


def _parts_of_first(examples: list[Any]) -> tuple[Any, ...]:
    return tuple(examples[0][name] for name in _PARTS)


def _taken_by(collator: Any) -> list[str]:
    try:
        return parameters_of(collator)
    except (TypeError, ValueError):
        return []
